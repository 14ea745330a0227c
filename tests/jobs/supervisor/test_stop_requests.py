"""Whether ranks were asked to stop, as their events tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.jobs.supervisor.attempts import (
    Attempt,
    recorded_stop_reason,
    was_requeued_by_ranks,
    was_stop_requested,
)
from hydroslurm.slurm.stops import StopReason


@pytest.mark.parametrize(
    ("kind", "meaning", "asked"),
    [
        (EventKind.STOP_REQUESTED, None, True),
        (EventKind.REQUEUE_ASKED, None, True),
        (EventKind.SIGNAL_PASSED_ON, "stop", True),
        (EventKind.SIGNAL_PASSED_ON, "user_pause", False),
        (EventKind.PARKED, None, False),
    ],
)
def test_who_asked(tmp_path: Path, kind: EventKind, meaning: str | None, asked: bool) -> None:
    """Any rank's or agent's word counts, of this attempt only."""
    assert not was_stop_requested(tmp_path / "none", since_epoch_ns=0)
    (tmp_path / "rank-00000.jsonl").write_text("torn")
    log = EventLog(tmp_path / "rank-00001.jsonl")
    log.append(Event(kind, 5, 1000, rank=1, data={} if meaning is None else {"meaning": meaning}))
    log.close()
    assert was_stop_requested(tmp_path, since_epoch_ns=1000) is asked
    assert not was_stop_requested(tmp_path, since_epoch_ns=1001)


def test_why(tmp_path: Path) -> None:
    """The first answer of this attempt counts, with the signal; not one of another attempt, and not
    that Slurm could not be asked."""
    stop, reason = EventKind.STOP_REQUESTED, EventKind.STOP_REASON
    for rank, attempt, epoch_ns, kind, data in (
        (0, 0, 900, reason, {"reason": "time_limit", "message": "of an attempt before"}),
        (0, 0, 1001, stop, {"signal": None}),
        (0, 0, 1003, reason, {"reason": "requeued", "message": "requeued by hand"}),
        (1, 0, 1000, stop, {"signal": "SIGTERM"}),
        (1, 0, 1002, reason, {"reason": "preempted", "message": "with a grace"}),
        (2, 0, 1001, reason, {"reason": "unknown", "message": "Slurm could not be asked"}),
        (0, 1, 2000, reason, {"reason": "asked", "message": "of the next attempt"}),
    ):
        log = EventLog(tmp_path / f"rank-{rank:05d}.jsonl")
        log.append(Event(kind, 5, epoch_ns, rank=rank, restart_count=attempt, data=data))
        log.close()
    first = Attempt(2, restart_count=0, began_epoch_ns=1000)
    assert recorded_stop_reason(tmp_path, first) == (
        StopReason.PREEMPTED,
        "SIGTERM received: with a grace",
    )
    assert recorded_stop_reason(tmp_path, Attempt(3, restart_count=1, began_epoch_ns=2001)) is None
    assert recorded_stop_reason(tmp_path / "none", first) is None


@pytest.mark.parametrize(
    ("kind", "rank", "restart_count", "epoch_ns", "requeued"),
    [
        (EventKind.REQUEUED, 0, 1, 1000, True),
        (EventKind.REQUEUE_ASKED, 0, 1, 1000, False),
        (EventKind.REQUEUED, 0, 0, 1000, False),
        (EventKind.REQUEUED, 0, 1, 999, False),
        (EventKind.REQUEUED, 1, 1, 1000, False),
    ],
    ids=["first-rank", "only-asked", "attempt-before", "before-it-began", "another-rank"],
)
def test_requeued_by_ranks(
    tmp_path: Path, kind: EventKind, rank: int, restart_count: int, epoch_ns: int, requeued: bool
) -> None:
    """Only the first rank's word that Slurm has taken the job back, in this very attempt, saves the
    question to Slurm."""
    attempt = Attempt(3, restart_count=1, began_epoch_ns=1000)
    assert not was_requeued_by_ranks(tmp_path / "none", attempt)
    for number in (0, 1):
        log = EventLog(tmp_path / f"rank-{number:05d}.jsonl")
        log.append(Event(EventKind.PARKED, 5, 1000, rank=number, restart_count=1))
        if number == rank:
            log.append(Event(kind, 6, epoch_ns, rank=number, restart_count=restart_count))
        log.close()
    assert was_requeued_by_ranks(tmp_path, attempt) is requeued
