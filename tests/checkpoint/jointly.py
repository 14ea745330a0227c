"""A program that saves with several real ranks, has them killed or their disks fail, and looks.

    jointly.py FOLDER SCENE    a line per round, then "done ROUNDS"

It loads torch once and forks the ranks. Every scene is a function below or in
jointscenes.py.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from pathlib import Path

from checkpoint import jointscenes
from checkpoint.faulty import CountingStorage, failing, killing
from checkpoint.jointstates import (
    COMMITTED,
    NOT_SAVED,
    RANKS,
    SIGKILLED,
    Fault,
    look,
    save,
)
from checkpoint.pipepeers import PipePeers, together

from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention


def rounds(folder: Path, faults: list[tuple[str, int, Fault]]) -> int:
    """A save per fault, of one rank each; what is there afterwards is the old state or the new."""
    first = together(RANKS, lambda peers: save(folder, peers, 1, CountingStorage(), "first"))
    assert first == [COMMITTED] * RANKS, first
    old = 1
    for name, victim, fault in faults:
        new = old + 1

        def work(peers: PipePeers, *, fault: Fault = fault, new: int = new) -> int:
            storage = fault(peers) if peers.rank == victim else CountingStorage()  # noqa: B023
            return save(folder, peers, new, storage, "save")

        ended = together(RANKS, work)
        there = look(folder, (old, new))
        print(f"round {name} of rank {victim}: {ended}, step {there - old} ahead", flush=True)
        told = {code for code in ended if code != SIGKILLED}
        assert len(told) == 1, f"{name}: the ranks tell {ended}"
        if COMMITTED in told:
            assert there == new, f"{name}: committed, and not there"
        if NOT_SAVED in told:
            assert there == old, f"{name}: not saved, and there"
        left = [path.name for path in folder.iterdir() if path.name.startswith(".")]
        assert not left or ended[victim] == SIGKILLED, f"{name}: {left}"
        old = there
        if old != new:  # the run goes on
            again = together(RANKS, lambda p: save(folder, p, new, CountingStorage(), "a"))  # noqa: B023
            assert again == [COMMITTED] * RANKS, again
            old = look(folder, (new,))
        CheckpointStore(folder).prune(Retention(keep=2))
    return len(faults)


def calls_of(folder: Path, rank: int) -> int:
    """How many I/O calls a rank makes in a save, when there are checkpoints before it."""
    storage = CountingStorage()
    folder.mkdir(parents=True)
    for step in (1, 2):
        ended = together(RANKS, lambda p: save(folder, p, step, CountingStorage(), "s"))  # noqa: B023
        assert ended == [COMMITTED] * RANKS

    def work(peers: PipePeers) -> None:
        mine = storage if peers.rank == rank else CountingStorage()
        assert save(folder, peers, 3, mine, "count") == COMMITTED
        if peers.rank == rank:
            (folder / "calls").write_text(str(len(storage.calls)))

    assert together(RANKS, work) == [0] * RANKS
    return int((folder / "calls").read_text())


def kills_at_calls(folder: Path, rank: int) -> int:
    """SIGKILL at every I/O call of one rank."""
    total = calls_of(folder / "count", rank)

    def at(n: int) -> Fault:
        return lambda _: killing(n)

    stride = 1 if total < 40 else 2
    faults = [(f"kill at {n}", rank, at(n)) for n in range(1, total + 1, stride)]
    return rounds(folder / "checkpoints", faults)


TOPICS = ("open", "written", "commit/0")


def kills_at_agreements(folder: Path) -> int:
    """SIGKILL of each rank before it hands in, at once after, and when it has been told."""

    def at(when: str, topic: str) -> Fault:
        def fault(peers: PipePeers) -> Storage:
            def hook(now: str, which: str) -> None:
                if now == when and which.endswith(topic):
                    os.kill(os.getpid(), signal.SIGKILL)

            peers.hook = hook
            return CountingStorage()

        return fault

    faults = [
        (f"kill {when} {topic}", rank, at(when, topic))
        for rank in range(RANKS)
        for topic in TOPICS
        for when in ("before", "after")
    ]
    return rounds(folder / "checkpoints", faults)


def broken_disks(folder: Path) -> int:
    """A disk of one rank that is full or broken from one call on."""

    def at(n: int, number: int) -> Fault:
        return lambda _: failing(n, number, for_good=True)

    faults = []
    for rank in (0, 1):
        total = calls_of(folder / f"count-{rank}", rank)
        # the last fsync of the parent folder fails when the checkpoint is there
        faults += [
            (f"{errno.errorcode[number]} at {n}", rank, at(n, number))
            for number in (errno.ENOSPC, errno.EIO)
            for n in range(2, total, 5 if number == errno.EIO else 3)
        ]
    return rounds(folder / "checkpoints", faults)


def main() -> None:
    warnings.simplefilter("error")
    if sys.version_info >= (3, 12):
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    folder, scene = Path(sys.argv[1]), sys.argv[2]
    if scene.startswith("calls_of_rank_"):
        print("done", kills_at_calls(folder, int(scene[-1])))
    else:
        here = {one.__name__: one for one in (kills_at_agreements, broken_disks)}
        here |= vars(jointscenes)
        print("done", here[scene](folder))


if __name__ == "__main__":
    main()
