"""What is chosen before a deadline: never less than what fits, and never nothing."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.checkpoint.deadline import Choice, InFlight, Pace, Situation, choose, remaining_s
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.store import Checkpoint


def _fits(seconds: float, now: Situation) -> bool:
    return seconds * 1.5 <= now.left_s


@pytest.mark.parametrize(
    ("now", "wait_s", "give_up", "at_risk"),
    [
        (Situation(7, 30.0, 2.0), 0, False, 0),
        (Situation(7, 2.0, 2.0), 0, False, 7),
        (Situation(7, 2.0, 2.0, committed_step=5), 0, False, 2),
        (Situation(7, 2.0, 2.0, committed_step=7), 0, False, 0),
        (Situation(7, 30.0, 2.0, in_flight=InFlight(6, 1.0)), 27, True, 0),
        (Situation(7, 5.0, 2.0, in_flight=InFlight(6, 4.0)), 0, True, 0),
        (Situation(7, 2.0, 2.0, in_flight=InFlight(6, 1.0)), 2, False, 1),
        (Situation(7, 2.0, 9.0, in_flight=InFlight(6, 8.0)), 2, False, 7),
        (Situation(7, 2.0, 8.0, in_flight=InFlight(6, 9.0)), 0, True, 7),
        (Situation(7, 2.0, 9.0, InFlight(7, 1.0, is_this=True)), 2, False, 0),
        (Situation(7, 2.0, 9.0, InFlight(7, 8.0, is_this=True), committed_step=3), 2, False, 4),
        (
            Situation(7, 2.0, 2.0, InFlight(6, 1.0), committed_step=7, is_committed=True),
            0,
            False,
            0,
        ),
    ],
)
def test_the_table(now: Situation, wait_s: float, give_up: bool, at_risk: int) -> None:
    """One line per case: what becomes of the save in flight, and how many steps are at risk."""
    choice = choose(now)
    assert choice.is_committed == now.is_committed
    assert (choice.wait_s, choice.give_up, choice.steps_at_risk) == (wait_s, give_up, at_risk)


def test_in_every_situation() -> None:
    """A save of this step is chosen whenever it fits, and the one in flight of this very state is
    never given up. Giving up an older one buys a save of this step, for which the time is kept
    while the older one is waited for, or there was no hope for the older one either. Whoever loses
    another number of steps reads another sentence."""
    at_risk: dict[str, int] = {}
    seconds = (0.0, 0.5, 1.0, 3.0, 10.0, 60.0)
    flights = [None, *(InFlight(step, s) for step in (90, 100) for s in seconds)]
    flights += [InFlight(100, s, is_this=True) for s in seconds]
    committed = ((None, False), (80, False), (100, False), (100, True))
    for left_s, save_s, flight, (step, done) in itertools.product(
        (-5.0, *seconds), seconds[1:], flights, committed
    ):
        now = Situation(100, left_s, save_s, flight, step, done)
        choice = choose(now)
        ours = flight is not None and flight.is_this
        hopeful = flight is not None and _fits(flight.remaining_s, now)
        lost = "lost" in choice.reason
        if done or (hopeful if ours else _fits(save_s, now)):
            assert choice.steps_at_risk == 0, (now, choice)
            assert not lost
        else:
            waits = (
                hopeful and flight is not None and flight.step == 100 and choice.wait_s == left_s
            )
            assert choice.steps_at_risk > 0 or step == 100 or waits, (now, choice)
            assert lost or ours, (now, choice)
        if choice.give_up:
            assert not ours
            assert choice.steps_at_risk == 0 or not hopeful
            assert not choice.wait_s or choice.wait_s + save_s * 1.5 <= left_s + 1e-9
        assert len(choice.reason) > 20
        assert "None" not in choice.reason
        if lost:
            assert at_risk.setdefault(choice.reason, choice.steps_at_risk) == choice.steps_at_risk


@given(
    left_s=st.floats(0, 1000),
    more_s=st.floats(0, 1000),
    save_s=st.floats(0.001, 1000),
    flight=st.none() | st.builds(InFlight, st.integers(1, 100), st.floats(0, 1000)),
    committed=st.none() | st.integers(0, 100),
)
def test_more_time_never_loses_more(
    left_s: float, more_s: float, save_s: float, flight: InFlight | None, committed: int | None
) -> None:
    """With a later deadline as many steps are at risk, or fewer; waiting is never for negative or
    endless time."""

    def at(seconds: float) -> Choice:
        return choose(Situation(100, seconds, save_s, flight, committed))

    sooner, later = at(left_s), at(left_s + more_s)
    assert later.steps_at_risk <= sooner.steps_at_risk
    for choice in (sooner, later):
        assert 0 <= choice.wait_s < math.inf
        assert flight is not None or not (choice.wait_s or choice.give_up)


def test_how_long_a_save_takes() -> None:
    """Assumed, then known from earlier attempts, then from this one: the slowest of the last five
    counts. Twice the bytes take twice as long, fewer no shorter; a save of next to nothing says
    little about a large one. One that is late gets a quarter of its age more."""
    earlier = Manifest(1, 0, "periodic", 0, save_s=5.0, state_bytes=10**8, files={})
    assert Pace().expect_s(10**8) == 2.0
    pace = Pace([Checkpoint(Path("nowhere"), earlier)])
    assert pace.expect_s(10**8) == 5.0
    for seconds, expected_s in ((3.0, 3.0), *[(1.0, 3.0)] * 4, (1.0, 1.0)):
        pace.add(seconds, state_bytes=10**8)
        assert pace.expect_s(10**8) == expected_s
    assert (pace.expect_s(2 * 10**8), pace.expect_s(10)) == (2.0, 1.0)
    tiny = Pace()
    tiny.add(0.5, state_bytes=10)
    assert tiny.expect_s(10**8) < 2.0
    late = [remaining_s(expected_s=8.0, elapsed_s=elapsed_s) for elapsed_s in (0.0, 4.0, 16.0)]
    assert late == [8.0, 4.0, 4.0]
