"""Lightning's fit and transformers' train(), twice each in one process, in which libraries take
signals: ``handlers_of_libraries.py FOLDER [STEP]``. Behind each step a person pauses it and lets it
go on; behind STEP it gets SIGTERM. At the end it is sent SIGTERM."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import types
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning_scenes import Module, loader, quiet
from transformers_scenes import Noisy, made_trainer

from hydroslurm.runtime.guard import CHECK_S

FOLDER, STOP = Path(sys.argv[1]), int((*sys.argv, 0)[2])
COMPOSER = """
import signal, sys

def leave(signo, frame):
    sys.exit(128 + signo)

signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGINT, leave)
"""
"""Composer's shape: what its import does to a process."""
_steps = 0


def behind_step() -> None:
    global _steps
    _steps += 1
    if _steps == 2:  # imported late
        composer = types.ModuleType("composer_like")
        exec(COMPOSER, vars(composer))
    if _steps == 6:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _steps in (2, 6):
        time.sleep(CHECK_S + 0.5)
    if _steps == 10:
        saved = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)}
        for one in saved:
            signal.signal(one, lambda *_: None)
        for one, handler in saved.items():
            signal.signal(one, handler)
    send(signal.SIGUSR1, signal.SIGUSR2)
    if _steps == STOP:
        send(signal.SIGTERM)
        time.sleep(0.2)


def send(*signals: int) -> None:
    for signo in signals:
        os.kill(os.getpid(), signo)


class Lightnings(lightning.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        behind_step()


class Transformers(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        behind_step()


def fit() -> None:
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, limit_train_batches=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Lightnings()],
    )  # fmt: skip
    trainer.fit(Module(), loader(), loader())


def train() -> None:
    options = {"enable_jit_checkpoint": True, "max_steps": 4}
    made_trainer(transformers.Trainer, Noisy(), FOLDER / "hf", options, [Transformers()]).train()


def main() -> None:
    warnings.filterwarnings("ignore")
    quiet()
    torch.set_num_threads(1)
    with (FOLDER / "stacks").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False, chain=True)
        for training in (fit, train, fit, train):
            training()
            send(signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGCONT)
            print("alive", flush=True)
        send(signal.SIGTERM)
        time.sleep(5)


if __name__ == "__main__":
    main()
