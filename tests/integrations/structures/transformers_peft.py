"""A Trainer with :mod:`adapted`, whose callback allocates the ranks."""

from __future__ import annotations

from typing import Any

import torch
from adapted import adapted, allocate
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Allocate(TrainerCallback):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        print("=", state.global_step, allocate(model, state.global_step))


class Adapting(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return model(**inputs).loss


set_seed(0)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, logging_steps=2, label_names=[],
)  # fmt: skip
rows = [{"x": row} for row in torch.randn(24, 4)]
Adapting(adapted(), args, train_dataset=rows, callbacks=[Allocate()]).train()
