"""How the clocks of processes and hosts are lined up, and what is said about it."""

from __future__ import annotations

import pytest
from report.ranklog import RankLog

from hydroslurm.core.events import EventKind
from hydroslurm.report.attempts import Attempt, DateWatch, attempts_of
from hydroslurm.report.clocks import align
from hydroslurm.report.external_sources import Accounting
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.history import History

S = 10**9


def watch(*moments: tuple[float, float]) -> DateWatch:
    """Of (CLOCK_MONOTONIC, how much later than usual it was dated), seconds."""
    seen = DateWatch()
    for at_s, late_s in moments:
        seen.see(round(at_s * S), round((1000 + at_s + late_s) * S))
    return seen


def two_hosts(*, off_s: float, apart_s: float = 0.004) -> tuple[Attempt, ...]:
    """Two ranks that parked together; the second one's date is off."""
    events = []
    for rank in range(2):
        log = RankLog(
            rank=rank, host=f"n{rank}", boot_s=900.0 * rank, date_off_s=off_s if rank else 0
        )
        log.installed().add(EventKind.RANKS_JOINED, 0.3, world_size=2, joined_s=0.3)
        log.pause(20, for_s=2)
        log.add(EventKind.ALL_PARKED, 20 + apart_s, of_ranks=[0], in_flight=0, let_through=0)
        events += log.uninstalled(50).events
    return attempts_of(events)


def test_a_date_that_was_late() -> None:
    """A line that was written after a stop of seconds counts neither as the date nor as an error;
    a date that was set in the middle is an error of that size."""
    seen = watch((1, 0), (11, 0), (25, 2.0), (31, 0))
    assert (seen.offset_ns, seen.error_ns) == (1000 * S, 0)
    assert watch((1, 0), (11, 0), (21, 0), (31, 60), (41, 60)).error_ns == 60 * S


def test_hosts_that_agree_are_left_alone() -> None:
    """Dates that what the ranks did together allows are taken, with the bound it gives."""
    attempts, alignment = align(two_hosts(off_s=0.001))
    (host,) = alignment.hosts
    assert (host.shift_ns, host.contradictory) == (0, False)
    assert host.error_ns == pytest.approx(0.005 * S, rel=0.05)
    assert alignment.error_ns is not None
    assert attempts[1].clock_offset_ns == pytest.approx(two_hosts(off_s=0.001)[1].clock_offset_ns)


@pytest.mark.parametrize("off_s", [7.0, -7.0])
def test_hosts_that_cannot_be_right_are_shifted(off_s: float) -> None:
    """A date that would have a rank know before it happened is put right, and that is said."""
    attempts, alignment = align(two_hosts(off_s=off_s))
    (host,) = alignment.hosts
    assert host.shift_ns == pytest.approx(off_s * S, abs=0.005 * S)
    assert host.error_ns is not None
    assert host.error_ns < 0.005 * S
    begins = [attempt.epoch_ns(attempt.first_mono_ns) for attempt in attempts]
    assert begins[0] == pytest.approx(begins[1], abs=0.005 * S)
    assert "n1 was shifted by" in alignment.message


def test_a_date_that_was_set_while_the_run_went_on() -> None:
    """Bounds that fit no one difference are told, not averaged."""
    events = []
    for rank in range(2):
        for attempt, off_s in enumerate((0.0, 60.0 * rank)):
            log = RankLog(rank=rank, pid=10 + attempt, restart_count=attempt, host=f"n{rank}")
            log.date_off_s = off_s
            log.installed(100 * attempt)
            log.add(EventKind.RANKS_JOINED, 100 * attempt + 0.3, world_size=2, joined_s=0.3)
            events += log.uninstalled(100 * attempt + 50).events
    _, alignment = align(attempts_of(events))
    assert alignment.hosts[0].contradictory
    assert alignment.error_ns is not None
    assert alignment.error_ns >= 59 * S
    assert "was set while the run went on" in alignment.message


def test_the_attempts_of_one_boot_are_counted_by_its_one_clock() -> None:
    """Three attempts of one rank, 7 s apart, whose host's date is set an hour ahead for the second
    one: no hour is spent anywhere. After a reboot the date is all there is."""
    attempts: list[Attempt] = []
    for number in range(3):
        log = RankLog(pid=10 + number, restart_count=number, boot="b1")
        log.date_off_s = 3600.0 if number == 1 else 0.0
        log.trains(100 * number, attempt=number + 1, step=20 * number)
        log.stop(100 * number + 92.9, step=20 * (number + 1), attempt=number + 1)
        attempts += attempts_of(log.events)
    reboot = RankLog(pid=20, boot="b2", boot_s=0.0, restart_count=3).trains(300, attempt=4)
    aligned, alignment = align([*attempts, *attempts_of(reboot.events)])
    history = History(name="x", attempts=aligned, alignment=alignment)
    assert [stop.waited_s for stop in history.stops] == [pytest.approx(7)] * 3
    goodput = goodput_of(history, Accounting())
    assert goodput is not None
    assert goodput.queued_s == pytest.approx(21)


def test_nothing_to_compare_with() -> None:
    """Where an attempt is too short, or nothing bounds a host, the error is unknown, and not 0."""
    assert watch((1, 0), (1.5, 0.1)).error_ns is None
    assert "too few" in align(attempts_of(RankLog().installed().events))[1].message
    logs = [RankLog(rank=rank, host=f"n{rank}").installed().uninstalled(50) for rank in range(2)]
    _, alignment = align(attempts_of(event for log in logs for event in log.events))
    assert (alignment.error_ns, alignment.hosts[0].error_ns) == (None, None)
    assert "n1 differs is not known" in alignment.message
