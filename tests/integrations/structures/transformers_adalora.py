"""A Trainer with :mod:`adalora`, whose callback updates it."""

from __future__ import annotations

from typing import Any

import torch
from adalora import Adapted
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Update(TrainerCallback):
    def on_optimizer_step(self, *args: Any, model: Any = None, **kwargs: Any) -> None:
        model.peft_allocators["default"].update(model)


set_seed(0)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, logging_steps=2,
)  # fmt: skip
rows = [{"x": row} for row in torch.randn(24, 4)]
Trainer(Adapted(), args, train_dataset=rows, callbacks=[Update()]).train()
