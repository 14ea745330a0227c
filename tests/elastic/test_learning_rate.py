"""A learning rate that follows the size."""

from __future__ import annotations

import math

import pytest
import torch

from hydroslurm.elastic.learning_rate import ScaledLearningRate, factor_of
from hydroslurm.elastic.roster import LearningRate


def stepped(scaled: ScaledLearningRate, optimizer: torch.optim.Optimizer) -> float:
    """How far a weight with gradient 1 goes in one step."""
    (weight,) = optimizer.param_groups[0]["params"]
    before = weight.item()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    scaled.step()
    return float(before - weight.item())


@pytest.mark.parametrize(
    ("rule", "wanted"), [("linear", 0.5), ("sqrt", math.sqrt(0.5)), ("none", 1)]
)
def test_a_step_is_as_long_as_the_size_says(rule: LearningRate, wanted: float) -> None:
    """The script and its scheduler see their own learning rate before and behind each step."""
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaled = ScaledLearningRate(rule, full=8, warmup_steps=0)
    scaled.watch(optimizer)
    scaled.resize(4)
    assert stepped(scaled, optimizer) == pytest.approx(0.1 * wanted)
    assert optimizer.param_groups[0]["lr"] == 0.1
    scheduler.step()
    assert stepped(scaled, optimizer) == pytest.approx(0.05 * wanted)
    assert set(optimizer.state_dict()["param_groups"][0]) >= {"lr", "momentum"}
    assert "_unscaled_lr" not in optimizer.state_dict()["param_groups"][0]


def test_a_change_is_spread_over_the_warm_up() -> None:
    """In equal parts, to the very value; a newcomer steps as the others do."""
    scaled = ScaledLearningRate("linear", full=4, warmup_steps=4)
    scaled.resize(4)
    assert scaled.factor == 1.0  # the first size of a process begins at once
    scaled.resize(2)
    newcomer = ScaledLearningRate("linear", full=4, warmup_steps=4)
    newcomer.load_state_dict(scaled.state_dict())
    newcomer.resize(2)
    seen = []
    for _ in range(6):
        scaled.step()
        newcomer.step()
        seen.append(scaled.factor)
        assert newcomer.factor == scaled.factor
    assert seen == pytest.approx([0.875, 0.75, 0.625, 0.5, 0.5, 0.5])
    assert scaled.factor == factor_of("linear", ranks=2, full=4)
