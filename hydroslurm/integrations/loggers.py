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
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.gate.signals import SignalPlan
from hydroslurm.runtime.child_signals import wandb_shielded
from hydroslurm.training.trackers import Trackers, keep, kept, mlflow_status

_VERSIONED = ("TensorBoardLogger", "CSVLogger")
_ASIDE = ".earlier"


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
        Trackers(folder, anew=anew, is_first=trainer.is_global_zero)  # the Run comes later
        earlier = {} if anew else kept(folder)
        versions = dict(earlier)
        for place, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in _VERSIONED and logger._version is None:
                if str(place) in versions:
                    logger._version = versions[str(place)]
                elif trainer.is_global_zero:
                    versions[str(place)] = logger.version
            elif type(logger).__name__ == "MLFlowLogger" and logger._run_id is None:
                logger._run_id = versions.get(str(place))
                if trainer.is_global_zero:
                    versions[str(place)] = logger.run_id
                    logger.experiment.update_run(logger.run_id, "RUNNING")
            elif type(logger).__name__ == "WandbLogger" and trainer.is_global_zero:
                _open_out_of_reach(logger)
        if trainer.is_global_zero and versions != earlier:
            keep(folder, versions)
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
        return {"rows": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for place, (metrics, _) in enumerate(self._csv()):
            _cut(metrics, state["rows"].get(str(place), 0))
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        for logger in self._of("TensorBoardLogger"):
            logger.experiment.close()
            logger._kwargs["purge_step"] = step
            logger._experiment = None  # opened again by whoever logs next

    def leave(self, status: object) -> None:
        """The process stops with a status. Lightning finalizes its loggers as ``failed`` next."""
        for logger in self._of("MLFlowLogger"):
            logger.finalize = functools.partial(_finalize, logger, mlflow_status(status))

    def _csv(self) -> Iterator[tuple[Path, Any]]:
        """The CSV loggers that write, each after its file."""
        return ((Path(one.log_dir) / "metrics.csv", one) for one in self._of("CSVLogger"))

    def _of(self, kind: str) -> Iterator[Any]:
        """Those that write: of the first rank."""
        if self._trainer.is_global_zero:
            yield from (one for one in self._trainer.loggers if type(one).__name__ == kind)


def _finalize(logger: Any, status: str, _: str) -> None:
    type(logger).finalize(logger, status)


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
    """Have a Hugging Face Trainer's callback for TensorBoard go on with the run of the earlier
    attempts. What the script names is left as it is.

    Args:
        trainer: before its ``train()``.
        folder: of the run.
        anew: there is to be no run of earlier attempts (``resume=False``).
    """
    if not trainer.is_world_process_zero():
        return
    earlier = {} if anew else kept(folder)
    values = dict(earlier)
    callbacks = {type(one).__name__: one for one in trainer.callback_handler.callbacks}
    board, args = callbacks.get("TensorBoardCallback"), trainer.args
    if board is not None:
        # transformers 5 has it in the callback; before, the arguments had a default with the time
        place = board if hasattr(board, "logging_dir") else args
        own = place.logging_dir or str(Path(args.output_dir) / "runs" / "all")
        place.logging_dir = values.setdefault("tensorboard", own)
    if anew or values != earlier:
        keep(folder, values)


def hide_from_board(trainer: Any, step: int) -> None:
    """What a killed attempt has logged into TensorBoard at this step and after it is logged again.

    Args:
        trainer: before its ``train()``.
    """
    for one in trainer.callback_handler.callbacks:
        if type(one).__name__ == "TensorBoardCallback" and one._SummaryWriter is not None:
            one._SummaryWriter = functools.partial(one._SummaryWriter, purge_step=step)
