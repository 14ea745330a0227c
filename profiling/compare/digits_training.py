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
    step = parts.load(checkpoint)
    with inside(parts.model), Observer(config.folder, step) as observer:
        for epoch in range(step // parts.steps_per_epoch, config.epochs):
            for batch in parts.loader(epoch):
                parts.learn(batch)
                step += 1
                observer.made(step)
            parts.save(checkpoint, step)
    finished(parts, step)
