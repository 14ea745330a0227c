"""What threads that no pause holds do with memory of the arena while it is away: read it, hand it
to the kernel, fork. On a CPU; a device's memory none of them can reach."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from processes import wait_until
from zygote import forked

from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.runtime import client

ARENA = {"HYDROSLURM_VACATE_BY": "arena"}

BUSY = """
    import errno, hashlib, os, sys, threading, torch, hydroslurm
    from hydroslurm.checkpoint.storage import LocalStorage
    controller = hydroslurm.install(run_dir=sys.argv[1])
    torch.manual_seed(0)
    weights = [torch.randn(1 << 20) for _ in range(16)]  # 64 MiB, in two segments and more
    source = [memoryview(one.numpy()).cast("B") for one in weights]
    bits = [hashlib.sha256(one).hexdigest() for one in source]
    target = torch.zeros(3 << 20)
    filled = memoryview(target.numpy()).cast("B")
    whole = b"".join(source[:3])
    open("file", "wb").write(whole)
    fifo = os.open("fifo", os.O_WRONLY)

    def thread():  # issues no operator: nobody holds it
        storage = LocalStorage()
        print("writes", *bits, flush=True)
        for one in source[:4]:  # the pipe is full while the memory goes away
            storage.write(fifo, one)
        os.close(fifo)
        print("written", flush=True)
        sys.stdin.readline()
        plain = os.open("plain", os.O_WRONLY | os.O_CREAT)
        try:
            os.write(plain, source[15])
            print("plain write worked", flush=True)
        except OSError as error:
            print("plain", error.errno == errno.EFAULT, flush=True)
        file, at = os.open("file", os.O_RDONLY), 0
        while at < len(filled):
            at += storage.read(file, [filled[at:]], offset=at)
        print("filled", bytes(filled) == whole, flush=True)
        print("sees", hashlib.sha256(source[9]).hexdigest() == bits[9], flush=True)
        pid = os.fork()
        if pid == 0:
            own = hashlib.sha256(source[14]).hexdigest() == bits[14]
            source[14][:8] = b"children"
            os._exit(7 if own else 1)
        print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

    one = threading.Thread(target=thread)
    one.start()
    while one.is_alive():
        torch.ones(8).sum()
    again = [hashlib.sha256(one).hexdigest() for one in source]
    print("end", again == bits, bytes(filled) == whole, flush=True)
"""


def test_threads_that_nobody_holds(tmp_path: Path) -> None:
    """A write that was under way when the memory went away is whole; so are a file that is read
    into it, what a thread reads itself and what a forked child sees. Only a plain system call of
    the script's own fails, with EFAULT."""
    os.mkfifo(tmp_path / "fifo")
    reading = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    with forked(BUSY, tmp_path, str(tmp_path / "run"), environ=ARENA) as process:
        bits = process.expect("writes").split()
        answer = client.pause(process.pid, vacate=True, timeout_s=60)
        assert answer.done, answer.message
        with os.fdopen(reading, "rb") as pipe:
            for wanted in bits[:4]:
                assert hashlib.sha256(pipe.read(4 << 20)).hexdigest() == wanted
        process.expect("written")
        process.say("go on")
        assert process.expect("plain") == "True"
        assert process.expect("filled") == "True"
        assert process.expect("sees") == "True"
        assert process.expect("child") == "7"
        assert client.resume(process.pid, timeout_s=60).done
        assert process.expect("end") == "True True"


SAVES = """
    import sys, torch, hydroslurm
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.ones(1, 1024)
    with hydroslurm.Run(model=model, optimizer=optimizer, directory=sys.argv[1],
                        every_steps=int(sys.argv[2])) as run:
        print("ready", flush=True)
        while run.step < 10_000 and "over" not in sys.argv:
            optimizer.zero_grad()
            model(data).sum().backward()
            optimizer.step()
            run.step += 1
            run.safe_point()
            if not int(sys.argv[2]) and run.step % 4 == 0:
                run.save()
"""


@pytest.mark.parametrize("every_steps", [2, 0], ids=["in the background", "by the training"])
def test_a_save_that_is_under_way(every_steps: int, tmp_path: Path) -> None:
    """The memory goes away while a save is written: by a thread of its own, from a copy, or by the
    training thread, which counts as parked meanwhile. Each checkpoint is whole."""
    run = RunDir(tmp_path / "run")
    with forked(SAVES, tmp_path, str(run.root), str(every_steps), environ=ARENA) as process:
        process.expect("ready")
        for _ in range(40):
            began = saves(run, EventKind.SAVE_STARTED)
            wait_until(lambda n=began: saves(run, EventKind.SAVE_STARTED) > n, "a save")
            answer = client.pause(process.pid, vacate=True, timeout_s=60)
            assert answer.done, answer.message
            assert client.resume(process.pid, timeout_s=60).done
            if between(run) > 1:
                break
        assert between(run) > 1
        done = saves(run, EventKind.SAVE_COMMITTED)
        wait_until(lambda: saves(run, EventKind.SAVE_COMMITTED) > done, "the save's commit")
        process.process.kill()
        process.wait()
    assert not saves(run, EventKind.SAVE_FAILED)
    store = CheckpointStore(run.checkpoints)
    found = store.committed()
    assert found
    for checkpoint in found:
        store.verify(checkpoint)


def saves(run: RunDir, kind: EventKind) -> int:
    return sum(event.kind is kind for event in read_events(run.rank_events(0)))


def between(run: RunDir) -> int:
    """How many vacates began after a save did and before it was committed."""
    kinds = (EventKind.SAVE_STARTED, EventKind.SAVE_COMMITTED, EventKind.VACATED)
    under_way = found = 0
    for event in read_events(run.rank_events(0)):
        if event.kind in kinds[:2]:
            under_way = int(event.kind is EventKind.SAVE_STARTED)
        found += under_way and event.kind is EventKind.VACATED
    return found
