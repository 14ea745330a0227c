"""Trainings as people write them with Lightning and with transformers' Trainer, in bf16. They know
nothing of preemption. Arguments: ``lightning|transformers FOLDER [--compile]``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from training import DRY, Size, digest, network, say

STEPS, BATCH = 16 if DRY else 24, 8
STEP_S = 0.05
"""Long enough to be stopped in the middle."""


def say_step(number: int) -> None:
    time.sleep(STEP_S)
    say(step=number)


def with_lightning(folder: Path) -> None:
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(Size(128, 2, BATCH, 32), dropout=0.1)

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            rows, targets = batch
            scores = self.net(rows + 0.05 * torch.randn_like(rows)).float()
            return torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Steps(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            say_step(trainer.global_step)

    L.seed_everything(42, workers=True)
    count = STEPS // 2 * BATCH
    rows = torch.randn(count, 32, 128)
    data = torch.utils.data.TensorDataset(rows, torch.randint(0, 256, (count, 32)))
    trainer = L.Trainer(
        accelerator="cpu" if DRY else "gpu",
        devices=1,
        precision="bf16-mixed",
        deterministic=True,
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Steps()],
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(data, BATCH, shuffle=True, num_workers=2))
    say(weights=digest(model.parameters()))


def with_transformers(folder: Path, *, compiled: bool) -> None:
    import transformers as hf

    class Steps(hf.TrainerCallback):
        def on_step_end(self, _: object, state: Any, *__: object, **___: object) -> None:
            say_step(state.global_step)

    torch.use_deterministic_algorithms(True)
    hf.set_seed(11)
    config = hf.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    rows = torch.randint(1, 512, (STEPS // 2 * BATCH, 64))
    trainer = hf.Trainer(
        model=hf.GPT2LMHeadModel(config),
        args=hf.TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            bf16=True,
            use_cpu=DRY,
            torch_compile=compiled,
            dataloader_drop_last=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Steps()],
    )
    trainer.train()
    say(weights=digest(trainer.model.parameters()))


def main() -> None:
    framework, where, *flags = sys.argv[1:]
    if DRY:
        torch.set_num_threads(1)
    if framework == "lightning":
        with_lightning(Path(where))
    else:
        with_transformers(Path(where), compiled="--compile" in flags)
