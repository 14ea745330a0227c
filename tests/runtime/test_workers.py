"""DataLoader workers outlive the rank's stop signals, and never the rank."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, child, has_ended, wait_until
from zygote import forked

from hydroslurm.runtime.children import shielded

METHODS = ("fork", "spawn", "forkserver")

PROGRAM = """
import os, signal, sys, time
from torch.utils.data import DataLoader, Dataset
from hydroslurm.runtime.children import workers_shielded

METHOD, HOW = sys.argv[1], sys.argv[2]
SIGNALS = (signal.SIGTERM, signal.SIGUSR2)

class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if HOW == "stuck" and index == 4:
            time.sleep(600)
        return index

def initialised(worker_id):
    os.write(1, b"own init %d\\n" % worker_id)  # one write: two workers talk at once

def main():
    os.setpgid(0, 0)
    seen = []
    for signo in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(signo, lambda signo, frame: seen.append(signo))
    loader = DataLoader(Slow(), 2, num_workers=2 if METHOD == "fork" else 1,
                        multiprocessing_context=METHOD, worker_init_fn=initialised)
    with workers_shielded(SIGNALS):
        batches = iter(loader)
    assert loader.worker_init_fn is initialised
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    first = next(batches)
    pids = " ".join(str(worker.pid) for worker in batches._workers)
    os.write(1, f"workers {pids}\\n".encode())
    sys.stdin.readline()
    if HOW == "stuck":
        del batches
        print("gone", flush=True)
        return
    rest = [next(batches) for _ in range(10)]
    print("batches", 1 + len(rest), "signals", *seen, flush=True)
    main.alive = batches  # still there at exit

if __name__ == "__main__":
    main()
"""


def workers(program: Child) -> list[int]:
    return [int(pid) for pid in program.expect("workers").split()]


def to_all(program: Child, signo: int) -> None:
    """As slurmstepd does under proctrack/linuxproc: from outside, to each process of the step."""
    subprocess.run(["bash", "-c", f"kill -{signo} -{program.pid}"], check=True)


@pytest.fixture
def program(tmp_path: Path, method: str, how: str) -> Iterator[Child]:
    begin = forked if method == "fork" else child  # what is spawned reads its parent's script
    with begin(PROGRAM, tmp_path, method, how) as started:
        yield started


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["shielded"])
def test_stop_signals_to_the_whole_job_step(program: Child) -> None:
    """Workers go on after two stop signals that the rank handles, whichever way they were made;
    the rank then leaves with workers alive, and they end with it."""
    pids = workers(program)
    to_all(program, signal.SIGTERM)
    to_all(program, signal.SIGUSR2)
    program.say("on")
    words = program.expect("batches").split()
    assert words[:2] == ["11", "signals"]
    assert set(map(int, words[2:])) == {signal.SIGTERM, signal.SIGUSR2}
    assert "own init 0" in program.lines
    # without the guard in the worker multiprocessing would wait for it for ever now
    assert program.wait() == 0, str(program)
    wait_until(lambda: all(map(has_ended, pids)), "the workers end with the rank")
    assert "Traceback" not in str(program)


@pytest.mark.parametrize(("method", "how"), [("forkserver", "shielded")])
def test_a_rank_that_is_killed(program: Child) -> None:
    """SIGKILL to the rank alone: its workers see that it is gone, and end."""
    pids = workers(program)
    program.signal(signal.SIGKILL)
    program.wait()
    wait_until(lambda: all(map(has_ended, pids)), "the workers end")


@pytest.mark.parametrize(("method", "how"), [("fork", "stuck")])
def test_a_worker_that_hangs(program: Child) -> None:
    """torch gives up on it and calls terminate(), which ends it although SIGTERM is blocked."""
    pids = workers(program)
    program.say("on")
    program.expect("gone")
    wait_until(lambda: all(map(has_ended, pids)), "the workers end")


def test_the_mask_is_put_back() -> None:
    """In the calling thread; what was blocked before stays so, and a signal that comes meanwhile
    reaches its handler when the block ends."""
    seen: list[int] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    handler = signal.signal(signal.SIGTERM, lambda signo, _: seen.append(signo))
    try:
        with shielded({signal.SIGTERM}):
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
            signal.pthread_kill(
                threading.get_ident(), signal.SIGTERM
            )  # others may take the process's
            assert not seen
        assert blocked == before | {signal.SIGTERM, signal.SIGUSR1}
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | {signal.SIGUSR1}
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
