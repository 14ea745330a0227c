"""The comparison with the peers: its storm and its table, and a small run on a real Slurm."""

from __future__ import annotations

import itertools
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
import table  # noqa: E402
from drive import Event, storm  # noqa: E402

COUNTS = {"suspend": 12, "preempt": 5, "requeue": 3}


def test_a_seed_is_a_storm() -> None:
    """The same seed gives the same moments, another one others, and the counts are kept."""
    one = storm(seed=1, counts=COUNTS, mean_gap_s=2.5)
    assert one == storm(seed=1, counts=COUNTS, mean_gap_s=2.5)
    assert one != storm(seed=2, counts=COUNTS, mean_gap_s=2.5)
    assert Counter(event.kind for event in one) == COUNTS


def test_events_do_not_overlap() -> None:
    """The next event comes when a suspend has been resumed, and after the time away of a stop."""
    events = storm(seed=3, counts=COUNTS, mean_gap_s=0.1, hold_s=(2.0, 3.0), away_s=9.0)
    for event, following in itertools.pairwise(events):
        held = event.kind == "suspend"
        assert 2.0 <= event.hold_s <= 3.0 if held else event.hold_s == 0.0
        assert following.at_s > event.at_s + (event.hold_s + 1.0 if held else 9.0)


def test_gaps_are_exponential() -> None:
    """The gaps have the mean that was asked for, and a deviation as large as it: a Poisson
    process."""
    events = storm(seed=4, counts={"requeue": 4000}, mean_gap_s=5.0, away_s=1.0)
    ends = [0.0, *(event.at_s + 1.0 for event in events[:-1])]
    gaps = [event.at_s - end for event, end in zip(events, ends, strict=True)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(5.0, rel=0.1)
    assert deviation == pytest.approx(mean, rel=0.1)


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


def test_a_save_of_an_epoch_is_none_of_the_stop() -> None:
    """What the next attempt found was the begin of an epoch, and steps were lost: nothing was saved
    for the stop."""
    course_attempts = [_attempt(0, (0, 50), signals=((15, 1005 * MS),)), _attempt(9000, (40, 100))]
    strike = drive.Strike(Event(1.0, "requeue"), "RUNNING", 1000 * MS, saves=[1500 * MS])
    course = drive.Course((strike,), 0, 20_000 * MS, ())
    got = figures.of_course(course, course_attempts, steps_per_epoch=40, steps=100, bare_step_s=0.1)
    assert got["signal_to_durable_ms_p50"] is None
    assert got["steps_lost_per_preemption"] == 10


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


def _result() -> dict[str, Any]:
    peer = {"remark": "R.", "finished": True, "by_hand": [], "version": "1"}
    full: dict[str, Any] = {column.key: 12.346 for column in table.COLUMNS}
    full |= {"samples_seen_twice": 3, "samples_never_seen": 0, "equal_bits": True}
    none: dict[str, Any] = dict.fromkeys(full)
    return {
        "title": "T",
        "events": [{"kind": "suspend"}, {"kind": "requeue"}],
        "goodput_limit": 0.5,
        "slurm_version": "22.05.8",
        "peers": {
            "hydroslurm": {**peer, "name": "hydroslurm", "title": "ours", **full},
            "x": {
                **peer,
                "name": "x",
                "title": "theirs",
                **none,
                "finished": False,
                "by_hand": ["submitted again: FAILED", "submitted again: FAILED"],
            },
        },
        "environment": {
            "date": "2025-01-31",
            "cpu_count": 2,
            "cpu_model": "X",
            "python": "3",
            "torch": "2",
        },
    }


def test_the_table_says_what_is_absent(tmp_path: Path) -> None:
    """A peer that did not finish, never saved or needed a hand is shown as such, and the picture
    can be drawn of it."""
    text = table.table(_result())
    ours, theirs = text.splitlines()[2:4]
    assert ours == "| ours | 1 | 12.3 | 12.3 | 3 | 0 | yes | 0 | 12.3 | 12.3 | 12.3 |"
    assert theirs.startswith("| theirs | 1 | did not finish |")
    assert "| never |" in theirs
    assert "left FAILED, and started again by hand" in text
    assert "1 suspends" in text
    assert "0.50 is what" in text
    table.draw(_result(), tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")


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
