"""One logical run for loggers: what the first attempt has chosen is kept in the run's folder."""

from __future__ import annotations

import functools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.core.files import parse_json, read_regular, write_atomically
from hydroslurm.training.reporting import notice

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


def new_id() -> str:
    """An id for Weights & Biases. It is drawn, not made of the run's folder: one that is emptied
    and used again has another run, whose rows would replace those of the one before."""
    return secrets.token_hex(4)


class LoggedRows:
    """Where the first rank's runs of Weights & Biases are in their own count of rows, ``_step``.

    Offline, an attempt begins to count at 0, and its rows would replace those of the one before
    when they are synced. What a killed attempt has logged behind its last checkpoint is logged
    again, in the same rows.

    Args:
        runs: those of this process that are open, in the same order in each attempt.
    """

    def __init__(self, runs: Callable[[], Iterable[Any]]) -> None:
        self._runs = runs

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [_next_row(run) for run in self._runs()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for run, row in zip(self._runs(), state["rows"], strict=False):
            if row > _next_row(run):
                run.log({}, step=row)  # makes no row


def _next_row(run: Any) -> int:
    try:
        return int(run.step)
    except Exception as error:  # of another process, of any kind; a logger costs no checkpoint
        notice(
            f"Weights & Biases does not say how many rows it has: {error or type(error).__name__}"
        )
        return 0


def continue_callbacks(trainer: Any, folder: Path, *, anew: bool) -> None:
    """Have a Hugging Face Trainer's callbacks for TensorBoard and Weights & Biases go on with the
    run of the earlier attempts. What the script or the environment names is left as it is.

    Args:
        trainer: before its ``train()``.
        folder: of the run.
        anew: there is to be no run of earlier attempts (``resume=False``).
    """
    if anew and trainer.is_world_process_zero():
        keep(folder, {})
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
    if "WandbCallback" in callbacks and trainer.is_world_process_zero():
        known = kept(folder)
        if "wandb" not in known:
            known["wandb"] = new_id()
            keep(folder, known)
        os.environ.setdefault("WANDB_RUN_ID", known["wandb"])
        os.environ.setdefault("WANDB_RESUME", "allow")


def hide_from_board(trainer: Any, step: int) -> None:
    """What a killed attempt has logged into TensorBoard at this step and behind it is logged again.

    Args:
        trainer: before its ``train()``.
    """
    for one in trainer.callback_handler.callbacks:
        if type(one).__name__ == "TensorBoardCallback" and one._SummaryWriter is not None:
            one._SummaryWriter = functools.partial(one._SummaryWriter, purge_step=step)


def runs_of_callbacks(trainer: Any) -> list[Any]:
    """The run that a Hugging Face Trainer's callback logs into, on the rank that does."""
    own = [
        one for one in trainer.callback_handler.callbacks if type(one).__name__ == "WandbCallback"
    ]
    runs = [getattr(one._wandb, "run", None) for one in own if trainer.is_world_process_zero()]
    return [run for run in runs if run is not None]
