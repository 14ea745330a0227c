"""Two trainings of one Trainer, the second one longer."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments, set_seed


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


set_seed(0)
args = TrainingArguments(
    "out", max_steps=8, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True, logging_steps=3, learning_rate=0.01,
)  # fmt: skip
rows = [{"x": row} for row in torch.randn(24, 4)]
trainer = Trainer(Net(), args, train_dataset=rows)
for _ in range(2):
    print("=", repr(trainer.train().training_loss))
print("=", [one["loss"] for one in trainer.state.log_history if "loss" in one])
