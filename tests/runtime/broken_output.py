"""A run whose output breaks: ``broken_output.py FOLDER BREAKS BY``; what breaks, and what the loop
writes with."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

import hydroslurm

FULL = Path("/dev/full")


class Tee:
    """The logger of many a script, whose own file is on a disk that becomes full."""

    def __init__(self) -> None:
        self.terminal, self.log = sys.stdout, FULL.open("w", buffering=1)
        self.is_full = False

    def write(self, text: str) -> None:
        self.terminal.write(text)
        if self.is_full:
            self.log.write(text)

    def flush(self) -> None:
        self.terminal.flush()


def in_worker() -> None:
    pid = os.fork()
    if pid == 0:
        print("of a worker", flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def writer(by: str) -> Callable[[], object]:
    """Made before the Run, so that a bound ``write`` which it holds is older than the guard."""
    bar = tqdm(total=1000, file=sys.stderr, mininterval=0.0)
    logger = logging.getLogger("script")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    return {
        "print": lambda: print("x" * 9000),
        "flushed": lambda: print("x", file=sys.stderr, flush=True),
        "tqdm": lambda: bar.update(1),
        "logging": lambda: logger.warning("x"),
        "bytes": lambda: sys.stdout.buffer.write(b"x" * 9000),
        "worker": in_worker,
    }[by]


def attempt(folder: str, breaks: str, by: str) -> None:
    reads, writes = os.pipe()
    os.dup2(writes, 1)
    os.dup2(writes, 2)
    os.close(writes)
    # as without -u: with a buffer
    sys.stdout, sys.stderr = (open(fd, "w", closefd=False) for fd in (1, 2))  # noqa: SIM115
    if breaks == "sigpipe":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    write = writer(by)
    tee = Tee()
    if breaks == "tee":
        sys.stdout = tee  # type: ignore[assignment]
    with hydroslurm.Run(model=torch.nn.Linear(1, 1), directory=folder, every_steps=0) as run:
        run.resume()
        while True:
            time.sleep(0.001)
            run.step += 1
            if run.step == 3:
                if breaks == "disk":
                    full = os.open(FULL, os.O_WRONLY)
                    os.dup2(full, 1)
                    os.dup2(full, 2)
                elif breaks != "tee":
                    os.close(reads)
                tee.is_full = True
                if breaks == "early":  # what read it was signalled first
                    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
                elif breaks != "no stop":
                    os.kill(os.getpid(), signal.SIGTERM)
            write()
            run.safe_point()


if __name__ == "__main__":
    attempt(*sys.argv[1:])
