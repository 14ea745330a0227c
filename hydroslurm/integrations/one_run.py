"""One logical run for loggers: what the first attempt has chosen is kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from hydroslurm.core.files import parse_json, read_regular, write_atomically

_FILE = "loggers.json"
_MOST_BYTES = 65536


def kept(folder: Path) -> dict[str, Any]:
    """What the first attempt has kept, by name; empty for a new run."""
    path = folder / _FILE
    if not path.exists():
        return {}
    found = parse_json(read_regular(path, limit_bytes=_MOST_BYTES))
    return dict(found) if isinstance(found, dict) else {}


def keep(folder: Path, values: dict[str, Any]) -> None:
    """For the attempts to come."""
    write_atomically(folder / _FILE, json.dumps(values).encode())


def run_id(folder: Path) -> str:
    """An id that is the same in all attempts, and for no other run: for Weights & Biases."""
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]


def continue_callbacks(trainer: Any, folder: Path) -> None:
    """Have a Hugging Face Trainer's callbacks for TensorBoard and Weights & Biases go on with the
    run of the earlier attempts. What the script or the environment names is left as it is.

    Args:
        trainer: before its ``train()``.
        folder: of the run.
    """
    callbacks = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
    board, args = callbacks.get("TensorBoardCallback"), trainer.args
    if board is not None and trainer.is_world_process_zero():
        # transformers 5 has it in the callback; before, the arguments had a default with the time
        place = board if hasattr(board, "logging_dir") else args
        known = kept(folder)
        if "tensorboard" not in known:
            known["tensorboard"] = place.logging_dir or str(Path(args.output_dir) / "runs" / "all")
            keep(folder, known)
        place.logging_dir = known["tensorboard"]
    if "WandbCallback" in callbacks:
        os.environ.setdefault("WANDB_RUN_ID", run_id(folder))
        os.environ.setdefault("WANDB_RESUME", "allow")
