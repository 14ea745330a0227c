"""A Trainer of transformers over one of the structures."""

from __future__ import annotations

from typing import Any

import torch
from structures import STRUCTURE, WORKERS, collator, dataset
from transformers import Trainer, TrainingArguments, set_seed


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class Curriculum(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if STRUCTURE == "curriculum" and self.state.global_step % 4 == 3:
            self.train_dataset.level += 1
        return super().training_step(*args, **kwargs)


set_seed(0)
collate = collator()
args = TrainingArguments(
    "out", max_steps=18, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", logging_steps=4, disable_tqdm=True, remove_unused_columns=False,
    dataloader_num_workers=WORKERS.get("num_workers", 0),
    dataloader_persistent_workers=WORKERS.get("persistent_workers", False),
)  # fmt: skip
trainer = Curriculum(Net(), args, lambda rows: {"x": collate(rows)}, train_dataset=dataset())
print("=", repr(trainer.train().training_loss))
