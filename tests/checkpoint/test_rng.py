"""The global random number generators come back exactly, without pickles."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy
import pytest
import torch

from hydroslurm.checkpoint import rng
from hydroslurm.errors import StateMismatch, UnsavableState


def draw() -> list[Any]:
    """Numbers of each generator, of each kind that keeps something back for the next call."""
    return [
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(),
        numpy.random.standard_normal(),
        numpy.random.randint(1000),
        torch.rand(3).tolist(),
        torch.randn(17).tolist(),
        torch.randperm(9).tolist(),
    ]


@pytest.mark.parametrize("warm_up", range(3))
def test_what_is_drawn_next(warm_up: int) -> None:
    """After a restore, through a file that is read without unpickling, the same numbers come."""
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    for _ in range(warm_up):
        draw()
    file = io.BytesIO()
    torch.save(rng.capture(), file)
    expected = [draw(), draw()]
    random.seed(2), numpy.random.seed(2), torch.manual_seed(2)
    assert draw() != expected[0]
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert [draw(), draw()] == expected


def test_capture_draws_nothing() -> None:
    """Looking changes nothing, and what was seen does not change when more is drawn."""
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    plain = draw()
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    state = rng.capture()
    assert draw() == plain
    rng.restore(state)
    assert draw() == plain


def test_a_device_that_is_not_here() -> None:
    """A state from a machine with more devices is restored as far as it goes, and says so."""
    state = rng.capture()
    expected = draw()
    state["devices"]["cuda:7"] = torch.zeros(16, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"also for cuda:7, which this process cannot see"):
        rng.restore(state)
    assert draw() == expected


def test_a_state_of_something_else() -> None:
    """What is missing is named, and a newer form is refused."""
    state = rng.capture()
    with pytest.raises(StateMismatch, match=r"lacks \['numpy', 'torch'\]"):
        rng.restore({key: state[key] for key in ("format", "python", "devices")})
    with pytest.raises(StateMismatch, match="format 9"):
        rng.restore({**state, "format": 9})


def test_another_generator_behind_numpy() -> None:
    """One that was put in numpy's place is named, not silently lost."""
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        with pytest.raises(UnsavableState, match="PCG64"):
            rng.capture()
    finally:
        numpy.random.set_bit_generator(before)


def test_a_new_rank() -> None:
    """A rank that had no part in the save draws numbers of its own, the same at each load."""
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    saved = rng.capture()
    saved["devices"] = {f"cuda:{n}": torch.arange(16, dtype=torch.uint8) for n in range(2)}
    drawn = []
    for rank in (4, 5, 4):
        state = rng.for_new_rank(saved, rank)
        assert len({bytes(one.tolist()) for one in state["devices"].values()}) == 2
        rng.restore({**state, "devices": {}})
        drawn.append(draw())
    rng.restore({**saved, "devices": {}})
    assert drawn[0] == drawn[2]
    for mine, others in zip(draw(), zip(*drawn[:2], strict=True), strict=True):
        if not isinstance(mine, int):  # of a thousand, two may be equal
            assert len({str(mine), *map(str, others)}) == 3
    assert saved["devices"]["cuda:0"].tolist() == list(range(16))
