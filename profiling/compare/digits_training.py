"""What the scripts of all peers share: the training, its saves once per epoch by hand, its end.

This folder and the one above it are on the path of the scripts: slurm_jobs.py sees to that.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from digits import Config, Parts, outcome
from observer import Observer

BATCH_SIZE = 4
WIDTH = int(os.environ.get("COMPARE_WIDTH", "96"))


def arguments() -> Config:
    """``SCRIPT FOLDER EPOCHS``."""
    return config(Path(sys.argv[1]), int(sys.argv[2]))


def config(folder: Path, epochs: int) -> Config:
    return Config(folder, epochs, think_s=0.0, batch_size=BATCH_SIZE, width=WIDTH)


def finished(parts: Parts, step: int) -> None:
    """Leave the mark by which the driver knows that the training is over, and when."""
    mark = parts.config.folder / "done.json"
    part = mark.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({**outcome(parts, step), "mono_ns": time.monotonic_ns()}))
    part.replace(mark)


def train_by_hand(
    config: Config,
    *,
    inside: Callable[[Any], AbstractContextManager[object]] = contextlib.nullcontext,
) -> None:
    """A training as people write it: a loop, and a checkpoint after each epoch.

    Args:
        inside: made of the model, and held around the loop.
    """
    parts = Parts(config)
    checkpoint = config.folder / "checkpoint.pt"
    step = _load(parts, checkpoint)
    with inside(parts.model), Observer(config.folder, step) as observer:
        for epoch in range(step // parts.steps_per_epoch, config.epochs):
            for batch in parts.loader(epoch):
                parts.learn(batch)
                step += 1
                observer.made(step)
            _save(parts, step, checkpoint)
    finished(parts, step)


def _save(parts: Parts, step: int, checkpoint: Path) -> None:
    part = checkpoint.with_suffix(f".{os.getpid()}")
    state = {
        "model": parts.model.state_dict(),
        "optimizer": parts.optimizer.state_dict(),
        "scheduler": parts.scheduler.state_dict(),
        "step": step,
        "rng": torch.get_rng_state(),
    }
    torch.save(state, part)
    part.replace(checkpoint)


def _load(parts: Parts, checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    state = torch.load(checkpoint)
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    parts.scheduler.load_state_dict(state["scheduler"])
    torch.set_rng_state(state["rng"])
    step: int = state["step"]
    return step
