"""A model with adapters of PEFT's: lora, dora or adalora, as the first argument says."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.last(self.first(x).tanh()).square().mean())


def adapted() -> Any:
    common: dict[str, Any] = {"target_modules": ["first", "last"], "lora_dropout": 0.1}
    if sys.argv[1] == "adalora":  # its allocator lowers ranks in the second epoch
        steps = {"tinit": 3, "tfinal": 4, "deltaT": 2, "total_step": 18}
        config: Any = AdaLoraConfig(init_r=4, target_r=2, **steps, **common)
    else:
        config = LoraConfig(r=2, use_dora=sys.argv[1] == "dora", **common)
    return get_peft_model(Base(), config)


def allocate(model: Any, step: int) -> str:
    """Behind the backward of a step; the ranks, and what they were chosen by."""
    if sys.argv[1] != "adalora":
        return ""
    model.base_model.update_and_allocate(step)
    means = model.base_model.rankallocator.exp_avg_ipt.values()
    return f"{model.peft_config['default'].rank_pattern} {sum(one.sum().item() for one in means)}"
