"""One logical run in the loggers: all attempts write into one version, under one id, and nothing is
written twice.

TensorBoard's and the CSV logger's version of the first attempt, and its id of Weights & Biases, are
kept in the run's folder. What an attempt has logged after the step that the next one goes on from
is taken out (CSV), hidden (TensorBoard's ``purge_step``) or replaced (Weights & Biases, offline).
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.core.files import parse_json, read_regular, write_atomically
from hydroslurm.gate.signals import SignalPlan
from hydroslurm.runtime.child_signals import wandb_shielded
from hydroslurm.training.reporting import warning

_FILE = "loggers.json"
_MOST_BYTES = 65536
_VERSIONED = ("TensorBoardLogger", "CSVLogger")
_ASIDE = ".earlier"


class LoggedRows:
    """Where the first rank's runs of Weights & Biases are in their own count of rows, ``_step``.

    Offline, an attempt begins to count at 0, and its rows would replace those of the one before
    when they are synced. What a killed attempt has logged after its last checkpoint is logged
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
        warning(
            f"Weights & Biases does not say how many rows it has: {error or type(error).__name__}"
        )
        return 0


def _kept(folder: Path) -> dict[str, Any]:
    """What the first attempt has kept, by name; empty for a new run."""
    path = folder / _FILE
    if not path.exists():
        return {}
    try:
        kept = parse_json(read_regular(path, limit_bytes=_MOST_BYTES))
        if not isinstance(kept, dict) or not all(map(_is_name, kept.items())):
            raise ValueError("names and versions of loggers are wanted")
        return kept
    except (OSError, ValueError) as error:
        warning(
            f"{path} is damaged ({error}): the loggers of this attempt begin a run of their own"
        )
        return {}


def _is_name(kept: tuple[str, object]) -> bool:
    """Lightning's loggers are kept by their place, and may be numbered; all else is text."""
    place, value = kept
    return type(value) is str or (type(value) is int and place.isdecimal())


def _keep(folder: Path, values: dict[str, Any]) -> None:
    """For the attempts to come."""
    write_atomically(folder / _FILE, json.dumps(values).encode())


def _new_id() -> str:
    """An id for Weights & Biases. It is drawn, not made of the run's folder: one that is emptied
    and used again has another run, whose rows would replace those of the one before."""
    return secrets.token_hex(4)


# --- Lightning's
# ------------------------------------------------------------------------------------------------


class Loggers:
    """The loggers of one Lightning trainer.

    Args:
        trainer: before its loggers have opened anything.
        folder: of the run.
        anew: there is to be no run of earlier attempts (``resume=False``).
    """

    def __init__(self, trainer: Any, folder: Path, *, anew: bool = False) -> None:
        self._trainer = trainer
        self._counts: dict[Path, _RowCount] = {}
        self._wandb = LoggedRows(lambda: [one.experiment for one in self._of("WandbLogger")])
        earlier = {} if anew else _kept(folder)
        versions = dict(earlier)
        for place, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in _VERSIONED and logger._version is None:
                if str(place) in versions:
                    logger._version = versions[str(place)]
                elif trainer.is_global_zero:
                    versions[str(place)] = logger.version
            elif type(logger).__name__ == "WandbLogger" and logger._id is None:
                if str(place) not in versions and trainer.is_global_zero:
                    versions[str(place)] = _new_id()
                logger._id = versions.get(str(place))
                logger._wandb_init.update(id=logger._id, resume="allow")
                if trainer.is_global_zero:
                    _open_out_of_reach(logger)
        if trainer.is_global_zero and versions != earlier:
            _keep(folder, versions)
        for metrics, _ in self._csv() if earlier else ():
            if metrics.exists():  # the logger removes what is there when it opens
                metrics.replace(f"{metrics}{_ASIDE}")

    def opened(self) -> None:
        """The loggers have been opened: what earlier attempts have written is put back."""
        for metrics, logger in self._csv():
            aside = Path(f"{metrics}{_ASIDE}")
            if aside.exists():
                aside.replace(metrics)
                with metrics.open(newline="") as file:
                    logger.experiment.metrics_keys = next(csv.reader(file), [])

    def state_dict(self) -> dict[str, Any]:
        """What is logged by now is written, too: the attempt that goes on from here does not log it
        again, and this one may be killed."""
        for _, logger in self._csv():
            logger.save()
        for logger in self._of("TensorBoardLogger"):
            logger.experiment.flush()
        rows = {
            str(place): self._counts.setdefault(metrics, _RowCount()).of(metrics)
            for place, (metrics, _) in enumerate(self._csv())
        }
        return {"wandb": self._wandb.state_dict(), "rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for place, (metrics, _) in enumerate(self._csv()):
            _cut(metrics, state["rows"].get(str(place), 0))
        self._wandb.load_state_dict(state["wandb"])
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        for logger in self._of("TensorBoardLogger"):
            logger.experiment.close()
            logger._kwargs["purge_step"] = step
            logger._experiment = None  # opened again by whoever logs next

    def _csv(self) -> Iterator[tuple[Path, Any]]:
        """The CSV loggers that write, each after its file."""
        return ((Path(one.log_dir) / "metrics.csv", one) for one in self._of("CSVLogger"))

    def _of(self, kind: str) -> Iterator[Any]:
        """Those that write: of the first rank."""
        if self._trainer.is_global_zero:
            yield from (one for one in self._trainer.loggers if type(one).__name__ == kind)


def _open_out_of_reach(logger: Any) -> None:
    """Loggers are opened before there is a Run, and so before the rank's children are safe, unless
    ``HYDROSLURM_PREEMPT`` is set."""
    plan = SignalPlan().with_environment(os.environ)
    with wandb_shielded(plan.stopping() | plan.killing()):
        _ = logger.experiment


class _RowCount:
    """The lines below the header of one file. A long training has millions: each save reads those
    since the one before. Under another header the logger has written all of them again."""

    def __init__(self) -> None:
        self._header = b""
        self._lines = self._read_bytes = 0

    def of(self, metrics: Path) -> int:
        if not metrics.exists():
            return 0
        with metrics.open("rb") as file:
            header = file.readline()
            if header != self._header or os.fstat(file.fileno()).st_size < self._read_bytes:
                self._header, self._lines, self._read_bytes = header, 0, len(header)
            file.seek(self._read_bytes)
            while chunk := file.read(1 << 20):
                self._lines += chunk.count(b"\n")
                self._read_bytes += len(chunk)
        return self._lines


def _cut(metrics: Path, rows: int) -> None:
    """Keep this many rows."""
    if _RowCount().of(metrics) > rows:
        new = metrics.with_suffix(".new")
        with metrics.open("rb") as file, new.open("wb") as kept:
            kept.writelines(itertools.islice(file, rows + 1))
        new.replace(metrics)


# --- transformers'
# ------------------------------------------------------------------------------------------------


def continue_callbacks(trainer: Any, folder: Path, *, anew: bool) -> None:
    """Have a Hugging Face Trainer's callbacks for TensorBoard and Weights & Biases go on with the
    run of the earlier attempts. What the script or the environment names is left as it is.

    Args:
        trainer: before its ``train()``.
        folder: of the run.
        anew: there is to be no run of earlier attempts (``resume=False``).
    """
    if not trainer.is_world_process_zero():
        return
    earlier = {} if anew else _kept(folder)
    values = dict(earlier)
    callbacks = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
    board, args = callbacks.get("TensorBoardCallback"), trainer.args
    if board is not None:
        # transformers 5 has it in the callback; before, the arguments had a default with the time
        place = board if hasattr(board, "logging_dir") else args
        own = place.logging_dir or str(Path(args.output_dir) / "runs" / "all")
        place.logging_dir = values.setdefault("tensorboard", own)
    if "WandbCallback" in callbacks:
        os.environ.setdefault("WANDB_RUN_ID", values.setdefault("wandb", _new_id()))
        os.environ.setdefault("WANDB_RESUME", "allow")
    if anew or values != earlier:
        _keep(folder, values)


def hide_from_board(trainer: Any, step: int) -> None:
    """What a killed attempt has logged into TensorBoard at this step and after it is logged again.

    Args:
        trainer: before its ``train()``.
    """
    for one in trainer.callback_handler.callbacks:
        if type(one).__name__ == "TensorBoardCallback" and one._SummaryWriter is not None:
            one._SummaryWriter = functools.partial(one._SummaryWriter, purge_step=step)


def runs_of_callbacks(trainer: Any) -> list[Any]:
    """The run that a Hugging Face Trainer's callback logs into, on the rank that does."""
    if not trainer.is_world_process_zero():
        return []
    callbacks = trainer.callback_handler.callbacks
    own = [one for one in callbacks if type(one).__name__ == "WandbCallback"]
    return [run for one in own if (run := getattr(one._wandb, "run", None)) is not None]
