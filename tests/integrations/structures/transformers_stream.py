"""A stream of datasets, shuffled through a buffer."""

from __future__ import annotations

import datasets
import torch
from transformers import Trainer, TrainingArguments, set_seed


class Net(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": super().forward(x).square().mean()}


set_seed(0)
rows = datasets.Dataset.from_dict({"x": torch.randn(40, 4).tolist()}).with_format("torch")
stream = rows.to_iterable_dataset(num_shards=2).shuffle(seed=5, buffer_size=8)
args = TrainingArguments(
    "out", max_steps=24, per_device_train_batch_size=4, use_cpu=True, report_to="none",
    save_strategy="no", disable_tqdm=True,
)  # fmt: skip
Trainer(Net(4, 4), args, train_dataset=stream).train()
