"""What is chosen before a deadline: never less than what fits, and never nothing."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.checkpoint.deadline import Choice, InFlight, Pace, Situation, choose, remaining_s
from hydroslurm.checkpoint.manifest import Checkpoint, Manifest


def _lost(choice: Choice) -> int:
    """Steps that a choice says are lost."""
    said = re.search(r"(\d+) steps? (?:is|are) lost|(changed) since then is lost", choice.reason)
    return 0 if said is None else int(said[1] or 0)


@pytest.mark.parametrize(
    ("left_s", "save_s", "flight", "committed", "wait_s", "give_up", "lost"),
    [
        (30.0, 2.0, None, None, 0, False, 0),
        (2.0, 2.0, None, None, 0, False, 7),
        (2.0, 2.0, None, 5, 0, False, 2),
        (2.0, 2.0, None, 7, 0, False, 0),
        (30.0, 2.0, InFlight(6, 1.0), None, 27, True, 0),
        (5.0, 2.0, InFlight(6, 4.0), None, 0, True, 0),
        (2.0, 2.0, InFlight(6, 1.0), None, 2, False, 1),
        (2.0, 9.0, InFlight(6, 8.0), None, 2, False, 7),
        (2.0, 8.0, InFlight(6, 9.0), None, 0, True, 7),
        (2.0, 9.0, InFlight(7, 1.0, is_this=True), None, 2, False, 0),
    ],
)
def test_the_table(
    left_s: float,
    save_s: float,
    flight: InFlight | None,
    committed: int | None,
    wait_s: float,
    give_up: bool,
    lost: int,
) -> None:
    """One line per case: what becomes of the save in flight, and how many steps are lost."""
    choice = choose(7, Situation(left_s, save_s, flight, committed))
    assert (choice.wait_s, choice.give_up, _lost(choice)) == (wait_s, give_up, lost)


def test_in_every_situation() -> None:
    """A save of this step is chosen whenever it fits, and the one in flight of this very state is
    never given up. Giving up an older one buys a save of this step, for which the time is kept
    while the older one is waited for, or there was no hope for the older one either."""
    seconds = (0.0, 0.5, 1.0, 3.0, 10.0, 60.0)
    flights = [None, *(InFlight(step, s) for step in (90, 100) for s in seconds)]
    flights += [InFlight(100, s, is_this=True) for s in seconds]
    for left_s, save_s, flight, committed in itertools.product(
        (-5.0, *seconds), seconds[1:], flights, (None, 80, 100)
    ):
        choice = choose(100, Situation(left_s, save_s, flight, committed))
        now = (left_s, save_s, flight, committed, choice)
        ours = flight is not None and flight.is_this
        hopeful = flight is not None and flight.remaining_s * 1.5 <= left_s
        fits = save_s * 1.5 <= left_s
        assert ("lost" in choice.reason) == (not ours and not fits), now
        if choice.give_up:
            assert not ours, now
            assert fits or not hopeful, now
            assert not choice.wait_s or choice.wait_s + save_s * 1.5 <= left_s + 1e-9, now
        assert "None" not in choice.reason


@given(
    left_s=st.floats(-10, 1000),
    more_s=st.floats(0, 1000),
    save_s=st.floats(0.001, 1000),
    flight=st.none() | st.builds(InFlight, st.integers(1, 100), st.floats(0, 1000)),
    committed=st.none() | st.integers(0, 100),
)
def test_more_time_never_loses_more(
    left_s: float, more_s: float, save_s: float, flight: InFlight | None, committed: int | None
) -> None:
    """With a later deadline as many steps are lost, or fewer; waiting is never for negative or
    endless time."""
    sooner, later = (
        choose(100, Situation(s, save_s, flight, committed)) for s in (left_s, left_s + more_s)
    )
    assert _lost(later) <= _lost(sooner)
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
