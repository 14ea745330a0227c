"""Where a run's time went."""

from __future__ import annotations

from typing import Any

import pytest
from report.ranklog import RankLog

from hydroslurm.core.events import EventKind
from hydroslurm.report.attempts import attempts_of
from hydroslurm.report.external_sources import Accounting, ExternalSources, SlurmAttempt
from hydroslurm.report.goodput import Goodput, goodput_of
from hydroslurm.report.history import History

T0 = 1_700_000_000
PARTS = ("productive", "made_again", "saving", "parked", "starting", "leaving", "unknown")


def goodput(*logs: RankLog, slurm: tuple[SlurmAttempt, ...] = ()) -> Goodput:
    history = History(
        name="run", attempts=attempts_of(event for log in logs for event in log.events)
    )
    found = goodput_of(history, ExternalSources(Accounting(slurm)))
    assert found is not None
    parts = sum(getattr(found, f"{name}_s") for name in PARTS)
    assert parts == pytest.approx(found.allocated_s, abs=1e-6)
    assert found.allocated_s + found.queued_s == pytest.approx(found.wall_s, abs=1e-6)
    return found


def slurm_attempt(number: int, submit: int, eligible: int, start: int, end: int) -> SlurmAttempt:
    moments = [T0 + one for one in (submit, eligible, start, end)]
    return SlurmAttempt(7, number, "REQUEUED", *moments, suspended_s=0)


def two_attempts(**second: Any) -> tuple[RankLog, RankLog]:
    """10.1 s, of which 2 parked; and 20 s later 15.1 s."""
    one = RankLog(pid=1).trains(0, attempt=1).pause(5, for_s=2).stop(10, step=40)
    two = RankLog(pid=2, restart_count=1).trains(30, attempt=2, **{"step": 40, **second})
    return one, two.stop(45, step=100, attempt=2)


def test_the_parts_are_the_whole() -> None:
    """Starting, parked, saving and leaving are what they are, and the rest made steps."""
    found = goodput(*two_attempts())
    assert found.allocated_from == "events"
    assert found.starting_s == pytest.approx(5.0)
    assert found.parked_s == pytest.approx(2.0, abs=0.001)
    assert found.leaving_s == pytest.approx(0.16)
    assert found.productive_s == pytest.approx(20.04 - 2.0, abs=0.01)
    assert found.queued_s == pytest.approx(19.9)
    assert found.steps == 100
    assert found.of_allocated == pytest.approx(found.productive_s / 25.2, rel=1e-3)
    assert found.step_s == pytest.approx(18.04 / 98, rel=1e-2)


def test_steps_that_were_made_again_do_not_count() -> None:
    """An attempt that began 13 steps back takes a third of the first one's time."""
    found, whole = goodput(*two_attempts(step=27)), goodput(*two_attempts())
    assert found.made_again_s == pytest.approx(5.52 * 13 / 39, rel=0.01)
    assert found.steps == 27 + 73
    assert found.of_wall is not None
    assert whole.of_wall is not None
    assert found.of_wall < whole.of_wall


def test_by_slurm() -> None:
    """With accounting the start of Python and the way out are allocated, and only the queue is
    not."""
    attempts = (slurm_attempt(0, -10, -10, -3, 11), slurm_attempt(1, 11, 17, 28, 47))
    found = goodput(*two_attempts(), slurm=attempts)
    assert (found.allocated_from, found.allocated_s, found.wall_s) == ("slurm", 33.0, 57.0)
    assert found.starting_s == pytest.approx(10.0)
    assert found.queued_s == pytest.approx(24.0)


def test_killed() -> None:
    """From the last event of a killed attempt nothing is known, and that is a part of its own."""
    log = RankLog(pid=1).trains(0, attempt=1)
    log.step = 30
    log.add(EventKind.SAVE_SKIPPED, 12)
    after = RankLog(pid=2, restart_count=1).trains(60, attempt=2, step=20)
    found = goodput(log, after.uninstalled(70), slurm=(slurm_attempt(0, 0, 0, 0, 50),))
    assert found.unknown_s == pytest.approx(38.0)
    assert found.at_most
    assert found.allocated_from == "both"


def test_without_steps() -> None:
    """Where only pausing was installed there is no goodput, and none is made up."""
    found = goodput(RankLog().installed().pause(3, for_s=2).uninstalled(10))
    assert (found.of_allocated, found.of_wall, found.steps) == (None, None, 0)
    assert found.parked_s == pytest.approx(2.0, abs=0.001)
    assert found.unknown_s == pytest.approx(8.0, abs=0.001)


def test_saves_that_the_training_waits_for() -> None:
    """A copy of the state is waited for; the commit in the background is not."""
    log = RankLog().trains(0, attempt=1)
    for kind, at_s in (("started", 5.0), ("staged", 5.5), ("committed", 9.0)):
        save = {"checkpoint_step": 9, "save_kind": "periodic"}
        log.add(EventKind(f"save_{kind}"), at_s, **save)
    assert goodput(log.stop(20, step=30)).saving_s == pytest.approx(0.5)
