"""Trainings as people write them with Lightning and with transformers' Trainer, in bf16. They know
nothing of preemption: ``stock.py lightning|transformers FOLDER [--cpu] [--compile]``.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch

STEPS, BATCH = 24, 8
STEP_S = 0.05
"""Long enough to be stopped in the middle."""


def say_step(number: int) -> None:
    time.sleep(STEP_S)
    print(f'{{"step": {number}}}', flush=True)


def say_weights(model: torch.nn.Module) -> None:
    state = hashlib.sha256()
    for tensor in model.state_dict().values():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(raw.numpy().tobytes())
    print(f'{{"weights": "{state.hexdigest()[:16]}"}}', flush=True)


def with_lightning(folder: Path, *, on_cpu: bool) -> None:
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layer = torch.nn.TransformerEncoderLayer(128, 4, 256, dropout=0.1, batch_first=True)
            encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.net = torch.nn.Sequential(encoder, torch.nn.Linear(128, 10))

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
    data = torch.utils.data.TensorDataset(rows, torch.randint(0, 10, (count, 32)))
    trainer = L.Trainer(
        accelerator="cpu" if on_cpu else "gpu",
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
    say_weights(model)


def with_transformers(folder: Path, *, on_cpu: bool, compiled: bool) -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Steps(TrainerCallback):
        def on_step_end(self, _: object, state: Any, *__: object, **___: object) -> None:
            say_step(state.global_step)

    torch.use_deterministic_algorithms(True)
    set_seed(11)
    config = GPT2Config(
        vocab_size=512, n_positions=64, n_embd=128, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    rows = torch.randint(1, 512, (STEPS // 2 * BATCH, 64))
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=2,
            per_device_train_batch_size=BATCH,
            bf16=True,
            use_cpu=on_cpu,
            torch_compile=compiled,
            torch_compile_backend=("eager" if on_cpu else "inductor") if compiled else None,
            dataloader_drop_last=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Steps()],
    )
    trainer.train()
    say_weights(trainer.model)


if __name__ == "__main__":
    framework, where, *flags = sys.argv[1:]
    if "--cpu" in flags:
        torch.set_num_threads(1)
    if framework == "lightning":
        with_lightning(Path(where), on_cpu="--cpu" in flags)
    else:
        compiled = "--compile" in flags
        with_transformers(Path(where), on_cpu="--cpu" in flags, compiled=compiled)
