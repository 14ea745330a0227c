"""How the clocks of processes and hosts are lined up, and what is said about it."""

from __future__ import annotations

import pytest
from report.ranklog import RankLog

from hydroslurm.events import EventKind
from hydroslurm.report.clocks import Alignment, DateWatch, align
from hydroslurm.report.lives import lives_of
from hydroslurm.report.pauses import Life

S = 10**9


def watch(*moments: tuple[float, float]) -> DateWatch:
    """Of (CLOCK_MONOTONIC, how much later than usual it was dated), seconds."""
    seen = DateWatch()
    for at_s, late_s in moments:
        seen.see(round(at_s * S), round((1000 + at_s + late_s) * S))
    return seen


def two_hosts(*, off_s: float, apart_s: float = 0.004) -> tuple[Life, ...]:
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
    return lives_of(events)


def test_one_late_record_moves_nothing() -> None:
    """A line that was written after a stop of seconds is no set date."""
    seen = watch((1, 0), (11, 0), (25, 2.0), (31, 0))
    assert (seen.offset_ns, seen.error_ns) == (1000 * S, 0)


def test_a_set_date_is_an_error() -> None:
    """A date that was set in the middle is told by how much."""
    seen = watch((1, 0), (11, 0), (21, 0), (31, 3), (41, 3))
    assert (seen.offset_ns, seen.error_ns) == (1000 * S, 3 * S)


def test_a_short_life_cannot_tell() -> None:
    """Nothing to compare with is not an error of 0."""
    assert watch((1, 0), (1.5, 0.1)).error_ns is None
    assert "too few" in Alignment().sentences()[0]


def test_hosts_that_agree_are_left_alone() -> None:
    """Dates that what the ranks did together allows are taken, with the bound it gives."""
    lives, alignment = align(two_hosts(off_s=0.001))
    (host,) = alignment.hosts
    assert (host.shift_ns, host.contradictory) == (0, False)
    assert host.error_ns == pytest.approx(0.005 * S, rel=0.05)
    assert alignment.error_ns is not None
    assert lives[1].clock_offset_ns == pytest.approx(two_hosts(off_s=0.001)[1].clock_offset_ns)


@pytest.mark.parametrize("off_s", [7.0, -7.0])
def test_hosts_that_cannot_be_right_are_shifted(off_s: float) -> None:
    """A date that would have a rank know before it happened is put right, and that is said."""
    lives, alignment = align(two_hosts(off_s=off_s))
    (host,) = alignment.hosts
    assert host.shift_ns == pytest.approx(off_s * S, abs=0.005 * S)
    assert host.error_ns is not None
    assert host.error_ns < 0.005 * S
    begins = [life.epoch_ns(life.first_mono_ns) for life in lives]
    assert begins[0] == pytest.approx(begins[1], abs=0.005 * S)
    assert "n1 was shifted by" in " ".join(alignment.sentences())


def test_a_date_that_was_set_while_the_run_went_on() -> None:
    """Bounds that fit no one difference are told, not averaged."""
    events = []
    for rank in range(2):
        for life, off_s in enumerate((0.0, 60.0 * rank)):
            log = RankLog(rank=rank, pid=10 + life, restart_count=life, host=f"n{rank}")
            log.date_off_s = off_s
            log.installed(100 * life)
            log.add(EventKind.RANKS_JOINED, 100 * life + 0.3, world_size=2, joined_s=0.3)
            events += log.uninstalled(100 * life + 50).events
    _, alignment = align(lives_of(events))
    assert alignment.hosts[0].contradictory
    assert alignment.error_ns is not None
    assert alignment.error_ns >= 59 * S
    assert "was set while the run went on" in " ".join(alignment.sentences())


def test_hosts_with_nothing_in_common() -> None:
    """Where nothing bounds a host the error is not known, and not 0."""
    logs = [RankLog(rank=rank, host=f"n{rank}").installed().uninstalled(50) for rank in range(2)]
    _, alignment = align(lives_of(event for log in logs for event in log.events))
    assert (alignment.error_ns, alignment.unbounded) == (None, ("n1",))
    assert "n1 differs is not known" in alignment.sentences()[0]
