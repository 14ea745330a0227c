"""Hugging Face's Trainer with its own checkpoint at SIGTERM, as its documentation has it:
``enable_jit_checkpoint``, and the last checkpoint given to ``train()``. Knows nothing of
hydroslurm."""

import os
import time

import torch
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )

    def forward(self, inputs, labels):
        time.sleep(0.5)  # stands for a larger model
        return {"loss": (self.net(inputs) - labels).square().mean()}


def main() -> None:
    set_seed(11)
    inputs = torch.randn(64, 8)
    arguments = TrainingArguments(
        output_dir="output", num_train_epochs=2, per_device_train_batch_size=4, report_to="none",
        enable_jit_checkpoint=True, save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    rows = [{"inputs": row, "labels": row.sum(0, keepdim=True)} for row in inputs]
    trainer = Trainer(Model(), arguments, train_dataset=rows)
    last = get_last_checkpoint("output") if os.path.isdir("output") else None
    trainer.train(resume_from_checkpoint=last)


if __name__ == "__main__":
    main()
