"""A Trainer of a model with PEFT's adapters: lora, dora or adalora, as the first argument says, of
which the last has its ranks chosen by a callback."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

KIND = sys.argv[1]


class Base(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.last(self.first(x).tanh()).square().mean())


class Allocate(TrainerCallback):
    """Behind the backward of a step; shows the ranks, and what they were chosen by."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        shown = ""
        if KIND == "adalora":
            model.base_model.update_and_allocate(state.global_step)
            means = model.base_model.rankallocator.exp_avg_ipt.values()
            pattern = model.peft_config["default"].rank_pattern
            shown = f"{pattern} {sum(one.sum().item() for one in means)}"
        print("=", state.global_step, shown)


class Adapting(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


set_seed(0)
common: dict[str, Any] = {"target_modules": ["first", "last"], "lora_dropout": 0.1}
if KIND == "adalora":  # its allocator lowers ranks in the second epoch
    steps = {"tinit": 3, "tfinal": 4, "deltaT": 2, "total_step": 18}
    config: Any = AdaLoraConfig(init_r=4, target_r=2, **steps, **common)
else:
    config = LoraConfig(r=2, use_dora=KIND == "dora", **common)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, logging_steps=2, label_names=[],
)  # fmt: skip
rows = [{"x": row} for row in torch.randn(24, 4)]
model = get_peft_model(Base(), config)
Adapting(model, args, train_dataset=rows, callbacks=[Allocate()]).train()
