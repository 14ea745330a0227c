"""What a script's objects keep beside the model that has a state of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.errors import StateMismatch
from hydroslurm.integrations.framework_state import Companions, held_by


def through_a_checkpoint(state: Any) -> Any:
    return decode(*encode(state, prefix="state"))


class Average:
    """As those of libraries: no module, but with a state."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_companions() -> None:
    """A module if it has changed, any other object with a state; not what is saved otherwise, nor
    what cannot be, which is said once."""
    said: list[str] = []

    def made() -> tuple[SimpleNamespace, Companions]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        one = SimpleNamespace(
            model=model, inner=model[0], teacher=torch.nn.Linear(2, 2), kind=torch.nn.Linear,
            frozen=torch.nn.Linear(2, 2), average=Average(1), odd=Average(object()), number=3,
        )  # fmt: skip
        kept = Companions(lambda: held_by({"ema": one}, known=[model]), say=said.append)
        kept.remember()
        return one, kept

    before, saved = made()
    before.teacher.weight.data.zero_()
    before.average.value = 2
    state = saved.state_dict()
    assert state.keys() == saved.state_dict().keys() == {"ema.teacher", "ema.average"}
    (text,) = said
    assert text.startswith("ema.odd is not saved, and the next attempt begins without it: ")
    after, loaded = made()
    loaded.load_state_dict(through_a_checkpoint(state))
    assert not after.teacher.weight.any()
    assert after.average.value == 2
    with pytest.raises(StateMismatch, match="which this script does not have"):
        loaded.load_state_dict({"ema.gone": {}})
