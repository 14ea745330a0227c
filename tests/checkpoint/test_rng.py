"""The global random number generators come back exactly, without pickles."""

from __future__ import annotations

import random
from typing import Any

import numpy
import pytest
import torch

from hydroslurm.checkpoint import rng
from hydroslurm.errors import StateMismatch, UnsavableState


def seed(number: int) -> None:
    random.seed(number), numpy.random.seed(number), torch.manual_seed(number)


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


def test_what_cannot_be_put_back_is_named() -> None:
    """A state of more devices is restored as far as it goes. One that lacks a generator or has a
    newer form is refused, as is another generator in numpy's place."""
    state = rng.capture()
    expected = draw()
    with pytest.raises(StateMismatch, match=r"lacks \['numpy', 'torch'\]"):
        rng.restore({key: state[key] for key in ("format", "python", "devices")})
    with pytest.raises(StateMismatch, match="format 9"):
        rng.restore({**state, "format": 9})
    state["devices"]["cuda:7"] = torch.zeros(16, dtype=torch.uint8)
    with pytest.warns(UserWarning, match=r"also for cuda:7, which this process cannot see"):
        rng.restore(state)
    assert draw() == expected
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(1))
    try:
        with pytest.raises(UnsavableState, match="PCG64"):
            rng.capture()
    finally:
        numpy.random.set_bit_generator(before)


def test_a_new_rank() -> None:
    """A rank that had no part in the save draws numbers of its own, the same at each load."""
    seed(1)
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
