"""Who may be sent a pause by signal, from what ranks wrote down."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.jobs.requests import Listeners, listeners

USR1, USR2, RTMIN3 = 10, 12, 37
TOLD: dict[str, object] = {
    "signals": ["SIGUSR1", "SIGUSR2"],
    "asked_by": {"pause": USR1, "resume": USR2},
    "step_id": 0,
    "task": 0,
    "step_tasks": 1,
    "held": False,
    "deaf": [],
}
ENDED, REPLACED = EventKind.UNINSTALLED, EventKind.HANDLER_REPLACED


class Job:
    """Event files of a job that each test makes up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[int, Path] = {}

    def tell(
        self, kind: EventKind, rank: int = 0, *, pid: int = 0, attempt: int = 1, **data: object
    ):
        path = self.files.setdefault(rank, self._folder / f"rank-{rank:05d}.jsonl")
        log = EventLog(path)
        log.append(Event(kind, 1, 1, rank, 7, attempt, pid or 100 + rank, "n1", data=data))
        log.close()

    def installed(
        self, rank: int = 0, *, pid: int = 0, attempt: int = 1, **changes: object
    ) -> None:
        told = {**TOLD, "task": rank, **changes}
        self.tell(EventKind.INSTALLED, rank, pid=pid, attempt=attempt, **told)

    def hear(self, verb: str = "pause") -> Listeners:
        return listeners(self.files, verb, restart_count=1)  # type: ignore[arg-type]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_only_the_steps_of_ranks(job: Job) -> None:
    """Each step by the signal that its ranks take; what did not announce itself is not named, nor
    what ranks were before a requeue."""
    job.installed(0, attempt=0)
    assert job.hear() == Listeners({}, frozenset(), ())
    job.installed(0, step_id=2, step_tasks=2)
    job.installed(1, step_id=2, step_tasks=2)
    assert job.hear() == Listeners({2: USR1}, frozenset({0, 1}), ())
    assert job.hear("resume").signals == {2: USR2}
    job.tell(ENDED, 1)  # one that has ended does not count as missing
    assert job.hear() == Listeners({2: USR1}, frozenset({0}), ())


def test_two_steps_in_one_file(job: Job) -> None:
    """Two sruns of one batch script, each with a rank 0: both are asked; one that has ended is
    not."""
    job.installed(step_id=0, pid=1)
    job.installed(step_id=1, pid=2, asked_by={"pause": RTMIN3})
    assert job.hear().signals == {0: USR1, 1: RTMIN3}
    job.tell(ENDED, pid=1)
    assert job.hear().signals == {1: RTMIN3}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"asked_by": {}}, "takes no signal for a pause"),
        ({"deaf": ["bash (pid 9)"]}, "SIGUSR1 would kill bash (pid 9), above rank 0"),
        ({"step_tasks": 3}, "1 of its 3 tasks have announced themselves"),
        ({"step_tasks": 3, "held": True}, ""),  # below srun --preempt none dies of it
        ({"step_id": None}, "in the batch script without srun"),
    ],
)
def test_refused(job: Job, changes: dict[str, object], words: str) -> None:
    """Somebody would die of the signal, or nobody would hear it: the reason is said."""
    job.installed(**changes)
    found = job.hear()
    assert found.signals == ({} if words else {0: USR1})
    assert len(found.refusals) == bool(words)
    assert words in "".join(found.refusals)


def test_a_handler_of_somebody_else(job: Job) -> None:
    """Lightning's, which saves and requeues: that step is left alone, and the other one asked."""
    job.installed(0, step_id=0)
    job.tell(REPLACED, 0, signal="SIGTERM")
    assert job.hear().signals == {0: USR1}
    job.tell(REPLACED, 0, signal="SIGUSR1")
    job.installed(1, step_id=1)
    found = job.hear()
    assert (found.signals, found.ranks) == ({1: USR1}, {1})
    assert "Lightning saves and requeues" in found.refusals[0]
