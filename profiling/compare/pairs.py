"""What a peer costs while nothing happens: its step time over that of the bare script.

Both train on one core of one node, in turns: a few steps of the one, as many of the other, so that
whatever the machine does meets both. They wait for each other in ``Observer.made``.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from peers import PEERS, Peer
from slurm_jobs import Job, Place

TURN_LIMIT_S = 120.0
FOREVER_EPOCHS = 1000


@dataclass(frozen=True)
class Pair:
    """Seconds per step, round by round; the first round, which warms up, is not among them."""

    peer_s: tuple[float, ...]
    bare_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median over the rounds of peer / bare, both of the same round."""
        return statistics.median(a / b for a, b in zip(self.peer_s, self.bare_s, strict=True))


def measure(peer: Peer, place: Place, folder: Path, *, rounds: int, steps: int) -> Pair:
    """The two in turns; each round the other one begins.

    Raises:
        TimeoutError: one of them did not take its turn.
    """
    jobs = [
        Job(one, place, folder / name, epochs=FOREVER_EPOCHS, turn=steps)
        for one, name in ((peer, "peer"), (PEERS["bare"], "bare"))
    ]
    try:
        for number in range(1, rounds + 2):
            for job in jobs if number % 2 else jobs[::-1]:
                _turn(job, number)
        peer_s, bare_s = (tuple(ns / 1e9 / steps for ns in _turns(job)[1:]) for job in jobs)
        return Pair(peer_s, bare_s)
    finally:
        for job in jobs:
            job.cancel()


def _turn(job: Job, number: int) -> None:
    fifo = os.open(job.folder / "turn", os.O_RDWR)  # with O_RDWR nobody waits for a reader
    try:
        os.write(fifo, b".")
        deadline = time.monotonic() + TURN_LIMIT_S
        while len(_turns(job)) < number:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{job.peer.title} did not take its turn\n{job.logs()}")
            time.sleep(0.005)
    finally:
        os.close(fifo)


def _turns(job: Job) -> list[int]:
    path = job.folder / "turns"
    text = path.read_text() if path.exists() else ""
    return [int(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
