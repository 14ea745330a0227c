"""The comparison with the peers: its storm and its table, and a small run on a real Slurm."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from clusters import require_slurm
from profiling.scripts import PROFILING, run_script

sys.path[:0] = [str(PROFILING / "compare"), str(PROFILING)]

import attempts  # noqa: E402
import drive  # noqa: E402 - scripts of a folder, not a package
import figures  # noqa: E402
from drive import Event, storm  # noqa: E402
from slurm_jobs import BEGIN_DELAY_S  # noqa: E402

COUNTS = {"suspend": 12, "preempt": 5, "requeue": 3}


def test_a_seed_is_a_storm() -> None:
    """The same seed gives the same moments, another one others, and the counts are kept."""
    one = storm(seed=1, counts=COUNTS, mean_gap_s=2.5)
    assert one == storm(seed=1, counts=COUNTS, mean_gap_s=2.5)
    assert one != storm(seed=2, counts=COUNTS, mean_gap_s=2.5)
    assert Counter(event.kind for event in one) == COUNTS


MS = 1_000_000


def _attempt(began_ms: int, steps: tuple[int, int], **more: Any) -> attempts.Attempt:
    return attempts.Attempt(began_ms * MS, *steps, **more)


def test_figures_of_a_pause_and_a_stop() -> None:
    """Parked and running are the ends of the silence around a resume, durable is the last save, and
    lost is what the next attempt had not."""
    course_attempts = [
        _attempt(
            0,
            (0, 50),
            silences=((105 * MS, 400 * MS),),
            signals=((20, 103 * MS), (12, 1004 * MS), (15, 1005 * MS)),
        ),
        _attempt(9000, (47, 100)),
    ]
    strikes = (
        drive.Strike(Event(0.1, "suspend", 0.2), "RUNNING", 100 * MS, 392 * MS),
        drive.Strike(Event(1.0, "preempt"), "RUNNING", 1000 * MS, saves=[1054 * MS]),
        drive.Strike(Event(2.0, "requeue"), "PENDING"),
    )
    course = drive.Course(strikes, submitted_ns=0, done_ns=20_000 * MS, by_hand=())
    got = figures.of_course(course, course_attempts, steps_per_epoch=40, steps=100, bare_step_s=0.1)
    assert got["events_struck"] == 2
    assert got["signal_to_parked_ms_p50"] == 2.0
    assert got["resume_command_to_first_operator_ms_p50"] == 8.0
    assert got["signal_to_durable_ms_p50"] == 50.0
    assert got["steps_lost_per_preemption"] == 3
    assert got["goodput"] == pytest.approx(0.5)
    assert got["minutes"] == pytest.approx(20 / 60)

    # what the next attempt found was the begin of an epoch, and steps were lost: nothing was saved
    # for the stop
    course_attempts = [_attempt(0, (0, 50), signals=((15, 1005 * MS),)), _attempt(9000, (40, 100))]
    strike = drive.Strike(Event(1.0, "requeue"), "RUNNING", 1000 * MS, saves=[1500 * MS])
    course = drive.Course((strike,), 0, 20_000 * MS, ())
    got = figures.of_course(course, course_attempts, steps_per_epoch=40, steps=100, bare_step_s=0.1)
    assert got["signal_to_durable_ms_p50"] is None
    assert got["steps_lost_per_preemption"] == 10


def test_where_the_time_goes() -> None:
    """Away is from the submission to the first step, and from the last step before a stop to the
    first one after it; an attempt that made no step is a part of that. Of several groups the others
    train on: nothing is lost then."""
    course_attempts = [
        _attempt(500, (0, 50), first_step_ns=2000 * MS, step_ns=5000 * MS),
        _attempt(6000, (0, 0)),
        _attempt(8000, (70, 90), first_step_ns=9000 * MS, step_ns=12_000 * MS),
    ]
    strike = drive.Strike(Event(4.5, "failure"), "RUNNING", 5000 * MS)
    course = drive.Course((strike,), 0, 20_000 * MS, ())
    got = figures.of_course(course, course_attempts, steps_per_epoch=40, steps=90, bare_step_s=0.1)
    assert got["away_s"] == pytest.approx(2 + 4)


def test_samples_of_the_steps_that_count() -> None:
    """What a later attempt trains anew counts once; the second epoch has a sample twice, and one
    not at all."""
    whole = _attempt(0, (0, 4), samples={1: (7, 8), 2: (9,), 3: (9, 8), 4: (7,)})
    first = _attempt(0, (0, 3), samples={1: (7, 8), 2: (9,), 3: (7, 9)})
    second = _attempt(9000, (2, 4), samples={3: (9, 8), 4: (8,)})
    found = figures.of_samples([first, second], [whole], steps_per_epoch=2)
    assert found == {"samples_seen_twice": 1, "samples_never_seen": 1}
    undisturbed = figures.of_samples([whole], [whole], steps_per_epoch=2)
    assert undisturbed == {"samples_seen_twice": 0, "samples_never_seen": 0}


@pytest.mark.slurm
@pytest.mark.long
def test_two_peers_in_a_small_storm(tmp_path: Path) -> None:
    """On a real Slurm two peers meet one suspend and one requeue and reach their end; hydroslurm
    loses no step, and all are seen by the same observer."""
    require_slurm()
    peers = ("hydroslurm", "hydrojobsche")
    result, _ = run_script("compare/run.py", "--peers", ",".join(peers), folder=tmp_path)
    assert list(result["peers"]) == list(peers)
    for peer in result["peers"].values():
        assert peer["finished"], peer["failure"]
        assert peer["events_struck"] == 2
        assert peer["signal_to_parked_ms_p50"] is not None
        assert 0 < peer["goodput"] < 1
    ours, theirs = result["peers"].values()
    assert ours["steps_lost_per_preemption"] == 0
    assert ours["signal_to_durable_ms_p50"] > 0
    assert theirs["signal_to_durable_ms_p50"] is None
    assert ours["equal_bits"] is True
    assert ours["samples_seen_twice"] == ours["samples_never_seen"] == 0
    result, _ = run_script("compare/run.py", "--finish", "--peers", "hydroslurm", folder=tmp_path)
    (failed,) = result["peers"].values()
    assert (failed["finished"], failed["events_struck"]) == (True, 2), failed["failure"]
    assert failed["steps_lost"] > 0
    assert failed["away_s"] > BEGIN_DELAY_S
    assert result["minutes_hydroslurm"] == failed["minutes"]
