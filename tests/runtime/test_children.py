"""Processes that multiprocessing spawns must survive the rank's pause signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
from processes import child, wait_until

from hydroslurm.core.status import RankStatus, read_status, status_of
from hydroslurm.runtime import client

CHILD = textwrap.dedent(
    """
    import multiprocessing, os, signal, sys, time
    from hydroslurm.runtime.child_signals import SpawnShield

    def work(pipe):
        pipe.send("up")
        pipe.send(pipe.recv() + 1)

    if __name__ == "__main__":
        method, shielded = sys.argv[1], sys.argv[2] == "shielded"
        shield = SpawnShield({signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP})
        if shielded:
            shield.install()
        context = multiprocessing.get_context(method)
        ours, theirs = context.Pipe()
        child = context.Process(target=work, args=(theirs,))
        child.start()
        theirs.close()
        # signalled from its very first moment on, while it is still importing
        for _ in range(20):
            os.kill(child.pid, signal.SIGUSR1)
            os.kill(child.pid, signal.SIGUSR2)
            time.sleep(0.001)
        try:
            assert ours.recv() == "up"
            ours.send(41)
            print("answer", ours.recv())
        except EOFError:
            print("child died")
        child.join(20)
        print("exit", child.exitcode)
        shield.uninstall()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        print("parent blocks", sorted(mask))
    """
)


def _run(tmp_path, method: str, shielded: str) -> str:
    script = tmp_path / "spawner.py"
    script.write_text(CHILD)
    done = subprocess.run(
        [sys.executable, str(script), method, shielded], capture_output=True, text=True, timeout=90
    )
    return done.stdout


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_child_survives_pause_signals(tmp_path, method: str) -> None:
    """A child that is signalled from its first moment works on and exits 0, and the parent's mask
    is as before."""
    out = _run(tmp_path, method, "shielded")
    assert "answer 42" in out
    assert "exit 0" in out
    assert "parent blocks []" in out


def test_the_shield_is_what_saves_it(tmp_path) -> None:
    """Without the shield the same spawned child dies of the signal: the test above tests
    something."""
    out = _run(tmp_path, "spawn", "bare")
    assert f"exit {-signal.SIGUSR1}" in out


FAMILY = """
    import json, multiprocessing, subprocess, sys, time
    import torch

    COUNTS = torch.from_file(sys.argv[1], shared=True, size=2, dtype=torch.int64)

    def train(which):
        # as torch.multiprocessing.spawn has it, and on until this process is ended
        torch.set_num_threads(1)
        x = torch.ones(4)
        while True:
            x = x * 1.0
            COUNTS[which] += 1

    def square(n):
        return n * n

    BUSY = "import signal; signal.signal(signal.SIGUSR2, lambda *_: print('heard', flush=True))"
    BUSY += "; print('up', flush=True)\\nwhile True: pass"

    if __name__ == "__main__":
        import hydroslurm

        hydroslurm.install(run_dir=sys.argv[2])
        pool = multiprocessing.get_context("fork").Pool(1)
        trainers = [
            multiprocessing.get_context(method).Process(target=train, args=(which,))
            for which, method in enumerate(("spawn", "fork"))
        ]
        trainers[0].start()
        while not COUNTS[0]:  # so that what is forked has its connection, too
            time.sleep(0.05)
        trainers[1].start()
        sleeps = subprocess.Popen(["sleep", "600"])
        busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
        busy.stdout.readline()
        print("pids", json.dumps([pool._pool[0].pid, trainers[0].pid, trainers[1].pid, busy.pid]))
        while (line := sys.stdin.readline().strip()) != "end":
            if line == "map":
                print("squares", pool.map_async(square, range(4)).get(60), sleeps.poll())
            if line == "heard":
                print("user's own", busy.stdout.readline().strip())
        busy.kill()
        worker = pool._pool[0]
        pool.terminate()
        pool.join()
        print("pool", worker.exitcode)
        sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_family(tmp_path: Path) -> None:
    """Signals to all processes of a rank, as Slurm sends them: children that train stand still with
    it and go on with it, and its state names the one that does not; none dies, and one that has a
    handler of its own hears it. A pool works on, and can be ended. With the rank gone nobody is
    held."""
    counts_file = tmp_path / "counts"
    counts_file.write_bytes(bytes(16))
    counts = numpy.memmap(counts_file, dtype=numpy.int64, mode="r")
    events = tmp_path / "run" / "events" / "rank-00000.jsonl"

    def state() -> RankStatus:
        now = read_status(status_of(events))
        assert now is not None
        return now

    def all_train() -> bool:
        before = counts.copy()
        wait_until(lambda: bool((counts > before).all()), "both children train")
        return True

    with child(
        FAMILY, tmp_path, str(counts_file), str(tmp_path / "run"), prefix=("setsid",)
    ) as rank:
        worker, spawned, forked, busy = json.loads(rank.expect("pids"))
        try:
            assert all_train()
            os.killpg(rank.pid, signal.SIGUSR1)
            parked = tuple(sorted((worker, spawned, forked)))
            wait_until(
                lambda: (state().children_running, state().children_parked) == ((busy,), parked),
                "the state names the one that runs",
            )
            assert state().message == "main process parked"
            assert f"1 child of it runs on (pid {busy})" in state().children_message
            before = counts.copy()
            wait_until(lambda: len(_ticks(busy)) > 1, "the busy one has run meanwhile")
            assert (counts == before).all()

            os.killpg(rank.pid, signal.SIGUSR2)
            assert all_train()
            wait_until(  # the children may be ahead of what is written
                lambda: (state().state, state().children_message) == ("running", ""), "all run on"
            )
            rank.say("heard")
            assert rank.expect("user's own") == "heard"
            os.killpg(rank.pid, signal.SIGTSTP)
            wait_until(lambda: state().state == "parked", "Slurm's pause")
            os.killpg(rank.pid, signal.SIGCONT)
            rank.say("map")
            assert rank.expect("squares") == "[0, 1, 4, 9] None"

            rank.say("end")
            assert rank.expect("pool") in ("0", str(-signal.SIGTERM))
            answer = client.pause(rank.pid)
            assert answer.done
            assert "2 children stand still with it" in answer.message
            os.kill(rank.pid, signal.SIGKILL)
            assert all_train()
        finally:
            os.killpg(rank.pid, signal.SIGKILL)


def _ticks(pid: int, seen: set[str] = set()) -> set[str]:  # noqa: B006 - gathers over the calls
    """The different processor times that a process was seen with."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seen.add(fields[11])
    return seen
