"""A Trainer that asks for schedulefree's optimizer by its name, and evaluates with it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).square().mean()}


class Say(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any, model: Any, **_: Any) -> None:
        print("=", state.global_step, logs.get("loss"), logs.get("eval_loss"), model.weight.sum())


set_seed(0)
args = TrainingArguments(
    "out", num_train_epochs=3, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, logging_steps=1, optim="schedule_free_adamw",
    lr_scheduler_type="constant", eval_strategy="epoch", learning_rate=0.05,
)  # fmt: skip
rows = [{"x": row} for row in torch.randn(24, 4)]
Trainer(Net(4, 1), args, train_dataset=rows, eval_dataset=rows[:6], callbacks=[Say()]).train()
