"""A callback with a generator, a meter and a teacher in a dict."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).square().mean()}


class Meter:
    def __init__(self) -> None:
        self.total, self.losses = 0.0, []


class Teaching(TrainerCallback):
    def __init__(self, model: Any) -> None:
        self.rng, self.meter = np.random.default_rng(3), Meter()
        self.models = {"teacher": copy.deepcopy(model)}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        with torch.no_grad():
            model.weight.add_(float(self.rng.normal()) * 0.01)
            self.models["teacher"].weight.lerp_(model.weight, 0.1)
            self.meter.total += self.models["teacher"].weight.sum().item()
            self.meter.losses.append(self.meter.total)
        print("=", state.global_step, self.meter.losses[-2:])


set_seed(0)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True,
)  # fmt: skip
rows, model = [{"x": row} for row in torch.randn(24, 4)], Net(4, 4)
Trainer(model, args, train_dataset=rows, callbacks=[Teaching(model)]).train()
