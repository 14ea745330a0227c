"""Where a run's time went."""

from __future__ import annotations

import pytest
from report.ranklog import RankLog
from report.views import history_of, tells

from hydroslurm.core.events import EventKind
from hydroslurm.report.external_sources import Accounting, ExternalSources, SlurmAttempt
from hydroslurm.report.goodput import Goodput, goodput_of

T0 = 1_700_000_000
PARTS = ("productive", "made_again", "saving", "parked", "starting", "leaving", "unknown")


def goodput(*logs: RankLog, slurm: tuple[SlurmAttempt, ...] = ()) -> Goodput:
    found = goodput_of(history_of(*logs), ExternalSources(Accounting(slurm)))
    assert found is not None
    parts = sum(getattr(found, f"{name}_s") for name in PARTS)
    assert parts == pytest.approx(found.allocated_s, abs=1e-6)
    assert found.allocated_s + found.queued_s == pytest.approx(found.wall_s, abs=1e-6)
    return found


def slurm_attempt(number: int, *moments: int) -> SlurmAttempt:
    """Submitted, eligible, started, ended."""
    return SlurmAttempt(7, number, "REQUEUED", *(T0 + one for one in moments), suspended_s=0)


def two_attempts(step: int = 40) -> tuple[RankLog, RankLog]:
    """10.1 s, of which 2 parked; and 20 s later 15.1 s."""
    one = RankLog(pid=1).trains(0, attempt=1).pause(5, for_s=2).stop(10, step=40)
    two = RankLog(pid=2, restart_count=1).trains(30, attempt=2, step=step)
    return one, two.stop(45, step=100, attempt=2)


def test_the_parts_are_the_whole() -> None:
    """Starting, parked, saving and leaving are what they are, and the rest made steps."""
    found = goodput(*two_attempts())
    parts = {"starting_s": 5.0, "parked_s": 2.0, "leaving_s": 0.16, "productive_s": 20.04 - 2.0}
    tells(found, {"allocated_from": "events", "queued_s": 19.9, "steps": 100, **parts})
    assert found.of_allocated == pytest.approx(found.productive_s / 25.2, rel=1e-3)
    assert found.step_s == pytest.approx(18.04 / 98, rel=1e-2)


def test_steps_that_were_made_again_do_not_count() -> None:
    """An attempt that began 13 steps back takes a third of the first one's time."""
    found, whole = goodput(*two_attempts(step=27)), goodput(*two_attempts())
    assert found.made_again_s == pytest.approx(5.52 * 13 / 39, rel=0.01)
    assert found.steps == 27 + 73
    assert (found.of_wall or 0) < (whole.of_wall or 0)


def test_by_slurm() -> None:
    """With accounting the start of Python and the way out are allocated; only the queue is not."""
    attempts = (slurm_attempt(0, -10, -10, -3, 11), slurm_attempt(1, 11, 17, 28, 47))
    found = goodput(*two_attempts(), slurm=attempts)
    parts = {"allocated_s": 33.0, "wall_s": 57.0, "starting_s": 10.0, "queued_s": 24.0}
    tells(found, {"allocated_from": "slurm", **parts})


def test_killed() -> None:
    """From the last event of a killed attempt nothing is known, and that is a part of its own."""
    log = RankLog(pid=1).trains(0, attempt=1).at_step(30).add(EventKind.SAVE_SKIPPED, 12)
    after = RankLog(pid=2, restart_count=1).trains(60, attempt=2, step=20)
    found = goodput(log, after.uninstalled(70), slurm=(slurm_attempt(0, 0, 0, 0, 50),))
    tells(found, {"unknown_s": 38.0, "at_most": True, "allocated_from": "both"})


def test_without_steps() -> None:
    """Where only pausing was installed there is no goodput, and none is made up."""
    found = goodput(RankLog().installed().pause(3, for_s=2).uninstalled(10))
    tells(found, {"of_allocated": None, "of_wall": None, "steps": 0})
    tells(found, {"parked_s": 2.0, "unknown_s": 8.0})


def test_saves_that_the_training_waits_for() -> None:
    """A copy of the state is waited for; the commit in the background is not."""
    log = RankLog().trains(0, attempt=1)
    for kind, at_s in (("started", 5.0), ("staged", 5.5), ("committed", 9.0)):
        log.add(EventKind(f"save_{kind}"), at_s, checkpoint_step=9, save_kind="periodic")
    assert goodput(log.stop(20, step=30)).saving_s == pytest.approx(0.5)
