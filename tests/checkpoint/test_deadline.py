"""What is chosen before a deadline: never less than what fits, and never nothing."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.checkpoint.deadline import Choice, InFlight, Situation, choose, remaining_s

SECONDS = (0.0, 0.5, 1.0, 3.0, 10.0, 60.0)
ALL = [
    Situation(
        step=100,
        left_s=left_s,
        save_s=save_s,
        in_flight=in_flight,
        committed_step=committed_step,
        is_committed=is_committed,
    )
    for left_s, save_s, in_flight, (committed_step, is_committed) in itertools.product(
        (-5.0, *SECONDS),
        SECONDS[1:],
        (
            None,
            *(InFlight(step, s) for step in (90, 100) for s in SECONDS),
            *(InFlight(100, s, is_this=True) for s in SECONDS),
        ),
        ((None, False), (80, False), (100, False), (100, True)),
    )
]


def _fits(seconds: float, now: Situation) -> bool:
    return seconds * 1.5 <= now.left_s


def _acts(now: Situation) -> tuple[bool, float, bool, int]:
    choice = choose(now)
    return choice.is_committed, choice.wait_s, choice.give_up, choice.steps_at_risk


@pytest.mark.parametrize(
    ("now", "wait_s", "give_up", "at_risk"),
    [
        (Situation(7, 30.0, 2.0), 0, False, 0),
        (Situation(7, 2.0, 2.0), 0, False, 7),
        (Situation(7, 2.0, 2.0, committed_step=5), 0, False, 2),
        (Situation(7, 30.0, 2.0, committed_step=7), 0, False, 0),
        (Situation(7, 2.0, 2.0, committed_step=7), 0, False, 0),
        (Situation(7, 30.0, 2.0, in_flight=InFlight(7, 1.0)), 27, True, 0),
        (Situation(7, 30.0, 2.0, in_flight=InFlight(6, 1.0)), 27, True, 0),
        (Situation(7, 5.0, 2.0, in_flight=InFlight(6, 4.0)), 0, True, 0),
        (Situation(7, 2.0, 2.0, in_flight=InFlight(6, 1.0)), 2, False, 1),
        (Situation(7, 2.0, 9.0, in_flight=InFlight(6, 8.0)), 2, False, 7),
        (Situation(7, 2.0, 8.0, in_flight=InFlight(6, 9.0)), 0, True, 7),
        (Situation(7, 2.0, 9.0, in_flight=InFlight(7, 1.0, is_this=True)), 2, False, 0),
        (
            Situation(7, 2.0, 9.0, in_flight=InFlight(7, 8.0, is_this=True), committed_step=3),
            *(2, False, 4),
        ),
    ],
)
def test_the_table(now: Situation, wait_s: float, give_up: bool, at_risk: int) -> None:
    """One line per case: what becomes of the save in flight, and how many steps are at risk."""
    assert _acts(now) == (False, wait_s, give_up, at_risk)


def test_a_committed_state_leaves_nothing_to_do() -> None:
    """It is neither saved nor waited for."""
    now = Situation(7, 2.0, 2.0, InFlight(6, 1.0), committed_step=7, is_committed=True)
    assert _acts(now) == (True, 0, False, 0)


def test_a_save_is_chosen_whenever_it_fits() -> None:
    """No situation in which this step could be committed ends with anything less."""
    for now in ALL:
        choice = choose(now)
        ours = now.in_flight is not None and now.in_flight.is_this
        fits = _fits(now.in_flight.remaining_s if ours and now.in_flight else now.save_s, now)
        if now.is_committed or fits:
            assert choice.steps_at_risk == 0, (now, choice)
            assert "lost" not in choice.reason
        else:
            is_kept = now.committed_step == now.step or (
                now.in_flight is not None
                and now.in_flight.step == now.step
                and _fits(now.in_flight.remaining_s, now)
                and choice.wait_s == now.left_s
            )
            assert choice.steps_at_risk > 0 or is_kept, (now, choice)
            assert "lost" in choice.reason or ours, (now, choice)


def test_the_save_of_this_very_state_is_never_given_up() -> None:
    """Whatever the estimates say, the save in flight of the same state goes on."""
    for now in ALL:
        if now.in_flight is not None and now.in_flight.is_this:
            assert not choose(now).give_up


def test_one_in_flight_is_given_up_only_for_one_of_this_step() -> None:
    """Giving up an older save must buy a save of this step, or follow from there being no hope for
    the older one either."""
    for now in ALL:
        choice = choose(now)
        if choice.give_up:
            assert now.in_flight is not None
            assert choice.steps_at_risk == 0 or not _fits(now.in_flight.remaining_s, now)


def test_waiting_leaves_time_for_the_full_save() -> None:
    """While a save that can be given up is waited for, the time of the full save stays
    untouched."""
    for now in ALL:
        choice = choose(now)
        if choice.give_up and choice.wait_s:
            assert choice.wait_s + now.save_s * 1.5 <= now.left_s + 1e-9


def test_every_choice_has_its_sentence() -> None:
    """A person reads why, with the seconds that were compared; who loses more reads another one."""
    at_risk: dict[str, int] = {}
    for now in ALL:
        choice = choose(now)
        assert len(choice.reason) > 20
        assert "None" not in choice.reason
        if "lost" in choice.reason:
            assert at_risk.setdefault(choice.reason, choice.steps_at_risk) == choice.steps_at_risk


@given(
    left_s=st.floats(0, 1000),
    more_s=st.floats(0, 1000),
    save_s=st.floats(0.001, 1000),
    flight=st.none() | st.builds(InFlight, st.integers(1, 100), st.floats(0, 1000)),
    committed=st.none() | st.integers(0, 100),
)
def test_more_time_never_loses_more(
    left_s: float,
    more_s: float,
    save_s: float,
    flight: InFlight | None,
    committed: int | None,
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


def test_a_late_save_is_not_expected_at_once() -> None:
    """What remains never becomes nothing: a save that is late by its own length gets a quarter of
    its age more."""
    assert remaining_s(expected_s=8.0, elapsed_s=0.0) == 8.0
    assert remaining_s(expected_s=8.0, elapsed_s=4.0) == 4.0
    assert remaining_s(expected_s=8.0, elapsed_s=16.0) == 4.0
