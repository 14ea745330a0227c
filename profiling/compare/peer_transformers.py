"""The Trainer of Hugging Face's transformers with ``enable_jit_checkpoint``, as its documentation
asks for: `#SBATCH --signal=TERM@90`, ``resume_from_checkpoint`` with the newest that is complete.
It saves after every epoch too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from digits import SEED, Parts, arguments
from observer import Observer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class WithLoss(nn.Module):
    """A model as Trainer wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.model(images)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def collate(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    images, labels = zip(*pairs, strict=True)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


class Observed(TrainerCallback):
    """Begins when the checkpoint has been loaded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._observer = Observer(self._folder, state.global_step).__enter__()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self._observer.made(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._observer.__exit__(None, None, None)


def newest(folder: Path) -> str | None:
    """The newest checkpoint that is complete: the documentation leaves that test to its users."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    whole = [
        path
        for path in found
        if (path / "trainer_state.json").exists()
        and not (path / "checkpoint-is-incomplete.txt").exists()
    ]
    return str(whole[-1]) if whole else None


def main() -> None:
    config = arguments()
    parts = Parts(config)
    folder = config.folder / "trainer"
    trainer = Trainer(
        model=WithLoss(parts.model),
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=config.epochs,
            per_device_train_batch_size=config.batch_size,
            save_strategy="epoch",
            save_total_limit=2,
            enable_jit_checkpoint=True,
            max_grad_norm=0.0,
            seed=SEED,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
            logging_strategy="no",
        ),
        train_dataset=parts.data,
        data_collator=collate,
        optimizers=(parts.optimizer, parts.scheduler),
        callbacks=[Observed(config.folder / "attempts")],
    )
    trainer.train(resume_from_checkpoint=newest(folder))
    if trainer.state.global_step == trainer.state.max_steps:
        parts.finished(trainer.state.global_step)


if __name__ == "__main__":
    main()
