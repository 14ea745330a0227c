"""What the comparison makes of two recorded runs: pure, by hand-made steps."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from hydroslurm.prove.compare import Comparison, compare, seeded_generators
from hydroslurm.prove.updates import Update

STEPS = 12
GENERATORS = {"torch"}


def step(i: int) -> Update:
    """Step ``i`` of a run that goes as it should: two samples each, other weights every time."""
    return Update(
        optimizer=0,
        weights={"a.weight": f"w{i}", "b.weight": f"v{i}"},
        after={"a.weight": f"w{i + 1}", "b.weight": f"v{i + 1}"},
        buffers={"norm.mean": f"m{i}"},
        state={"a.weight.exp_avg": f"s{i}"} if i else {},
        lr=(f"{0.1 / (i + 1)}",),
        rng={"torch": f"r{i}", "numpy": f"unseeded{i}"},
        rows=((f"x{2 * i}", f"x{2 * i + 1}"),),
        samples=((2 * i, 2 * i + 1),),
        losses=(f"{1 / (i + 1)}",),
    )


WHOLE = [step(i) for i in range(STEPS)]


def compared(*attempts: list[Update]) -> Comparison:
    return compare({0: WHOLE}, {0: list(attempts)}, steps=STEPS, generators=GENERATORS)


def test_steps_that_were_repeated_or_left_out_are_counted() -> None:
    """By the weights that an attempt begins with, whatever it counts itself."""
    result = compared(WHOLE[:5], WHOLE[3:8], WHOLE[9:])
    assert (result.repeated, result.left_out, result.differences) == (2, 1, [])
    assert not result.is_equal


UNKNOWN: dict[str, Any] = {"samples": ()}
"""Of a loader that nobody knows."""
WRONG = [
    ({"rows": (("x8", "x9"),), **UNKNOWN}, "those of 1 step earlier, seen twice"),
    ({"rows": (("x12", "x13"),), **UNKNOWN}, "those of 1 step later; what lies between is never"),
    ({"rows": (("x3", "x7"),), **UNKNOWN}, "generator of the sampler"),
    ({"rows": (("y1", "y2"),), **UNKNOWN}, "none of these is in the recorded steps"),
    # the same samples with other values: the indices tell that the order is right
    ({"rows": (("y1", "y2"),)}, "augmentation"),
    ({"rows": (("y1", "y2"),), "samples": ((3, 7),)}, "order"),
    ({"rng": {"torch": "other"}}, "the random numbers of torch are others"),
    ({"rng": {"torch": "r6"}}, "in the middle of a step"),
    ({"buffers": {"norm.mean": "other"}}, "buffers differ: norm.mean"),
    ({"state": {}}, "the state of optimizer 1 differs and is empty: a.weight.exp_avg"),
    ({"lr": ("0.1",)}, "the learning rate is 0.1 and not"),
    ({"losses": ("0.5",)}, "neither a parameter nor a buffer"),
    ({"after": {"a.weight": "w6", "b.weight": "other"}}, "other values of b.weight"),
    # weights that the undisturbed run never had: all of them, or some that were not saved
    ({"weights": {"a.weight": "w5", "b.weight": "new"}}, "other values of b.weight; the rest"),
    ({"weights": {"a.weight": "?", "b.weight": "new"}}, "never had"),
    ({"weights": {"a.weight": "w5", "c.weight": "?"}}, "b.weight, c.weight"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_the_first_difference_is_named(values: dict[str, Any], said: str) -> None:
    """At its step of its attempt, once."""
    result = compared(WHOLE[:5], [replace(step(5), **values), *WHOLE[6:]])
    assert [(one.attempt, one.step) for one in result.differences] == [(2, 6)]
    assert said in f"{result.differences[0]} {result.differences[0].cause}"


@pytest.mark.parametrize(
    ("epoch", "other", "place", "cause"),
    [(2, 0, "step 1, which has this place in an earlier epoch", "set_epoch"),
     (1, 2, "step 9, which has this place in a later epoch", "as it was when the epoch began")],
)  # fmt: skip
def test_the_order_of_another_epoch(epoch: int, other: int, place: str, cause: str) -> None:
    """Four steps make an epoch; this one begins with what the other has there."""
    whole = [replace(one, iterator=1 + i // 4) for i, one in enumerate(WHOLE)]
    begin, there = whole[4 * epoch], whole[4 * other]
    wrong = replace(begin, rows=there.rows, samples=there.samples)
    attempts = {0: [whole[: 4 * epoch], [wrong]]}
    found = compare({0: whole}, attempts, steps=STEPS, generators=GENERATORS).differences[0]
    assert f"those of {place}" in found.what
    assert cause in found.cause


def test_half_an_accumulated_step() -> None:
    """Two forwards make a step; the stop came between them."""
    two = [replace(one, rows=(one.rows[0], (f"z{i}",))) for i, one in enumerate(WHOLE)]
    half = replace(two[5], rows=two[5].rows[:1])
    result = compare({0: two}, {0: [two[:5], [half, *two[6:]]]}, steps=STEPS, generators=GENERATORS)
    assert "1 forward instead of 2" in result.differences[0].what


def test_every_rank_is_compared_and_the_earliest_difference_comes_first() -> None:
    """Rank 1 differs before rank 0 does."""
    late, early = replace(step(9), lr=("1",)), replace(step(7), lr=("1",))
    stopped = {
        0: [WHOLE[:5], [*WHOLE[5:9], late]],
        1: [WHOLE[:5], [*WHOLE[5:7], early]],
    }
    result = compare({0: WHOLE, 1: WHOLE}, stopped, steps=STEPS, generators=GENERATORS)
    assert [(one.rank, one.step) for one in result.differences] == [(1, 8), (0, 10)]
    assert ", rank 1)" in str(result.differences[0])


def test_generators_that_nobody_seeds_do_not_count() -> None:
    """NumPy's in a script that does not use it."""
    again = [replace(one, rng={**one.rng, "numpy": "other"}) for one in WHOLE]
    assert seeded_generators({0: WHOLE}, {0: again}) == {"torch"}
    assert compare({0: WHOLE}, {0: [again]}, steps=STEPS, generators=GENERATORS).is_equal


def test_a_learning_rate_of_zero_makes_places_alike() -> None:
    """Of steps with equal weights the one that is next is meant."""
    flat = [replace(one, weights={"a": "w"}, after={"a": "w"}, state={}) for one in WHOLE]
    result = compare({0: flat}, {0: [flat[:5], flat[5:]]}, steps=STEPS, generators=GENERATORS)
    assert result.is_equal
