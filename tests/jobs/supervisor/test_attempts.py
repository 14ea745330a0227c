"""How attempts are counted whatever is killed, which seconds count as active, and whether ranks
were asked to stop, as their events tell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.jobs.supervisor.attempts import (
    LONGEST_TICK_S,
    ActiveTime,
    Attempt,
    Attempts,
    Ending,
    count_preemptions,
    count_restarts,
    last_recorded,
    recorded_stop_reason,
    was_requeued_by_ranks,
    was_stop_requested,
)
from hydroslurm.jobs.supervisor.conditions import FORMAT, add_condition, read_conditions
from hydroslurm.jobs.supervisor.exit_policy import Action, ExitDecision
from hydroslurm.slurm.policy import StopReason


def test_attempts_are_numbered_over_requeues(tmp_path: Path) -> None:
    """After a requeue the count continues. The first end counts: a janitor that comes late does not
    turn a success into a failure."""
    path = tmp_path / "starts.jsonl"
    attempts = Attempts(path)
    one = attempts.begin(0)
    failure = ExitDecision(Action.RESTART, "worker-1", 3, True, "ReplicaFailed", "it failed")
    attempts.end(one, Ending.FAILED, decision=failure)
    attempts.end(one, Ending.SUCCEEDED)
    two = Attempts(path).begin(1)
    assert (one.number, two.number, two.restart_count) == (1, 2, 1)
    kept = Attempts(path).all()
    assert [one.ending for one in kept] == [Ending.FAILED, None]
    assert kept[0].decision == failure


@pytest.mark.parametrize(
    ("restart_counts", "endings", "restarts", "preemptions"),
    [
        ([0], [None], 0, 0),
        ([0], [Ending.FAILED], 0, 0),
        ([0, 0], [Ending.FAILED, Ending.SUCCEEDED], 1, 0),
        ([0, 0, 0], [Ending.FAILED, Ending.RESTARTED, Ending.FAILED], 2, 0),
        ([0, 1, 1], [Ending.PREEMPTED, Ending.LOST, None], 0, 1),
        ([0, 1, 2, 2, 2], [Ending.PREEMPTED] * 2 + [Ending.FAILED] * 2 + [None], 2, 2),
    ],
)
def test_failures_and_preemptions_are_two_budgets(
    restart_counts: list[int], endings: list[Ending | None], restarts: int, preemptions: int
) -> None:
    """A requeue is one preemption. Only a failure that was followed by a start is a restart: a job
    that failed once and was given up has had none."""
    attempts = [
        Attempt(number, restart_count, number, ending=ending)
        for number, (restart_count, ending) in enumerate(
            zip(restart_counts, endings, strict=True), 1
        )
    ]
    assert (count_restarts(attempts), count_preemptions(attempts)) == (restarts, preemptions)


def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Killed while it writes, again and again: every attempt is there whole, numbers are never used
    twice, nothing that was ended is open again."""
    path = tmp_path / "starts.jsonl"
    program = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from hydroslurm.jobs.supervisor.attempts import Attempts, Ending
        attempts = Attempts(Path(sys.argv[1]))
        print("ready", flush=True)
        while True:
            attempt = attempts.begin(0)
            attempts.started(attempt, srun_pid=1, srun_started=2)
            attempts.end(attempt, Ending.FAILED)
        """
    )
    seen = 0
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        more = seen + 3
        while len(Attempts(path).all()) < more:
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        kept = Attempts(path).all()
        assert [one.number for one in kept] == list(range(1, len(kept) + 1))
        assert len(kept) >= more
        assert sum(one.ending is None for one in kept[seen:]) <= 1
        seen = len(kept)


def test_attempts_that_only_a_run_has_recorded_are_counted_too(tmp_path: Path) -> None:
    """A Run counts starts by torchrun as attempts; the next number is free in both counts."""
    recorded = tmp_path / "attempts.jsonl"
    assert last_recorded(recorded) == 0
    recorded.write_text('{"attempt": 1}\n{"attempt": 3}\n[\n{"v": 2')
    assert last_recorded(recorded) == 3
    attempts = Attempts(tmp_path / "starts.jsonl")
    assert attempts.begin(0).number == 1
    assert attempts.begin(1, after=last_recorded(recorded)).number == 4


def test_files_of_another_version_are_skipped(tmp_path: Path) -> None:
    """What another version means by its words is not known; what is torn counts for nothing."""
    attempts, conditions = Attempts(tmp_path / "starts.jsonl"), tmp_path / "conditions.jsonl"
    attempts.begin(0)
    add_condition(conditions, "Running")
    for file in (attempts.path, conditions):
        row = json.loads(file.read_text())
        assert row["v"] == FORMAT
        file.write_text(json.dumps(row | {"v": FORMAT + 1}) + "\n")
    assert read_conditions(conditions) == attempts.all() == ()
    (tmp_path / "active.json").write_text('{"active_s": ')
    assert ActiveTime(tmp_path / "active.json").seconds == 0.0
    assert ActiveTime(tmp_path / "no" / "such" / "folder").tick() < 60.0


def test_time_without_ticks_was_not_spent_running(tmp_path: Path) -> None:
    """Suspended with its ranks, the supervisor cannot tick; that time is left out, as is the time
    between two supervisors, of which the second begins where the first has written."""
    now_s = 1000.0
    active = ActiveTime(tmp_path / "active.json", clock=lambda: now_s)
    for _ in range(10):
        now_s += 0.5
        active.tick()
    now_s += 3600.0
    assert active.tick() == 5.0 + LONGEST_TICK_S
    active.write()
    now_s = 7.0
    second = ActiveTime(tmp_path / "active.json", clock=lambda: now_s)
    now_s += 1.0
    assert second.tick() == 6.0 + LONGEST_TICK_S


@pytest.mark.parametrize(
    ("kind", "data", "asked"),
    [
        (EventKind.STOP_REQUESTED, {}, True),
        (EventKind.SIGNAL_PASSED_ON, {"meaning": "stop"}, True),
        (EventKind.SIGNAL_PASSED_ON, {"meaning": "user_pause"}, False),
    ],
)
def test_who_asked(tmp_path: Path, kind: EventKind, data: dict[str, str], asked: bool) -> None:
    """Any rank's or agent's word counts, of this attempt only."""
    (tmp_path / "rank-00000.jsonl").write_text("torn")
    tell(tmp_path, 1, kind, 1000, **data)
    assert was_stop_requested(tmp_path, since_epoch_ns=1000) is asked
    assert not was_stop_requested(tmp_path, since_epoch_ns=1001)


def tell(
    folder: Path, rank: int, kind: EventKind, epoch_ns: int, attempt: int = 0, **data: object
) -> None:
    """An event of a rank."""
    log = EventLog(folder / f"rank-{rank:05d}.jsonl")
    log.append(Event(kind, 5, epoch_ns, rank=rank, restart_count=attempt, data=data))
    log.close()


def test_why(tmp_path: Path) -> None:
    """The first answer of this attempt counts, with the signal; not one of another attempt, and not
    that Slurm could not be asked."""
    stop, reason = EventKind.STOP_REQUESTED, EventKind.STOP_REASON
    tell(tmp_path, 0, reason, 900, reason="time_limit", message="of an attempt before")
    tell(tmp_path, 0, stop, 1001, signal=None)
    tell(tmp_path, 0, reason, 1003, reason="requeued", message="requeued by hand")
    tell(tmp_path, 1, stop, 1000, signal="SIGTERM")
    tell(tmp_path, 1, reason, 1002, reason="preempted", message="with a grace")
    tell(tmp_path, 2, reason, 1001, reason="unknown", message="Slurm could not be asked")
    tell(tmp_path, 0, reason, 2000, 1, reason="asked", message="of the next attempt")
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
        tell(tmp_path, number, EventKind.PARKED, 1000, 1)
    tell(tmp_path, rank, kind, epoch_ns, restart_count)
    assert was_requeued_by_ranks(tmp_path, attempt) is requeued
