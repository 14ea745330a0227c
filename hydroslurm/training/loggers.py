"""One logical run in trackers and loggers: all attempts log to the same run of Weights & Biases or
MLflow, and into the same version of a framework's TensorBoard or CSV logger. Nothing is logged
twice.

The run that is open at the first step, whoever opened it, is kept in the run folder. The next
attempt offers it until its own first step, so that ``wandb.init()`` and ``mlflow.start_run()``
continue it; to offer one, Weights & Biases is imported. A tracker that fails costs a warning, never
a step or a checkpoint.

What an attempt has logged after the step that the next one resumes from is removed (CSV), hidden
(TensorBoard's ``purge_step``) or replaced (Weights & Biases, offline).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.decoding import decode
from hydroslurm.core.exitcodes import CANCELLED, FAILED, RUN_AGAIN, at_end
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.gate.signals import SignalPlan
from hydroslurm.runtime.children import wandb_shielded
from hydroslurm.training.rank_group import warning

_FILE = "loggers.json"
_MOST_BYTES = 65536
_VERSIONED = ("TensorBoardLogger", "CSVLogger")
_ASIDE = ".earlier"
_offer = contextlib.ExitStack()
"""Withdraws what the newest Run of this process offers."""


def kept(folder: Path) -> dict[str, Any]:
    """Read what the first attempt has kept for the others, by name; empty for a new run."""
    path = folder / _FILE
    try:
        return decode(dict[str, str | int], read_regular(path, limit_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warning(f"{path} is damaged ({error}): the loggers of this attempt begin a new run")
        return {}


def keep(folder: Path, values: dict[str, Any]) -> None:
    """Keep this, and nothing else, for the next attempts."""
    write_atomically(folder / _FILE, json.dumps(values).encode())


@dataclass(frozen=True)
class Tracker:
    """How one tracker is spoken to.

    Attributes:
        open_run: the run that is open in this process, or None, given the tracker's module.
        id_of: the id by which the next attempt continues a run.
        leave: end a run for a process that exits with a status, given the module, too.
    """

    open_run: Callable[[Any], Any]
    id_of: Callable[[Any], str]
    leave: Callable[[Any, Any, object], None]


def mlflow_status(exit_status: object) -> str:
    """The status in MLflow of a run whose process exits so."""
    return {RUN_AGAIN: "SCHEDULED", CANCELLED: "KILLED"}.get(exit_status, "FAILED")  # type: ignore


def _leave_mlflow(mlflow: Any, run: Any, status: object) -> None:
    while run is not None:  # nested ones first
        mlflow.end_run(mlflow_status(status))
        run = mlflow.active_run()


def _leave_wandb(_: Any, run: Any, status: object) -> None:
    """Its own hooks see ``sys.exit()`` and no SystemExit of ours, and would report a good end."""
    if status == RUN_AGAIN:
        run.mark_preempting()
    run.finish(exit_code=status)


TRACKERS = {
    "wandb": Tracker(
        open_run=lambda wandb: wandb.run,
        id_of=lambda run: str(run.id),
        leave=_leave_wandb,
    ),
    "mlflow": Tracker(
        open_run=lambda mlflow: mlflow.active_run(),
        id_of=lambda run: str(run.data.tags.get("mlflow.parentRunId", run.info.run_id)),
        leave=_leave_mlflow,
    ),
}


class Trackers:
    """The trackers' runs of one Run.

    Args:
        folder: of the run.
        anew: earlier attempts do not count.
        is_first: whether this is the first rank; others log to runs of their own.
    """

    def __init__(self, folder: Path, *, anew: bool, is_first: bool) -> None:
        self._folder = folder
        self._is_first = is_first
        self._row = 0
        _offer.close()
        values = kept(folder) if is_first else {}
        if anew and values.keys() & TRACKERS.keys():
            values = {name: value for name, value in values.items() if name not in TRACKERS}
            keep(folder, values)
        for name in TRACKERS.keys() & values.keys():
            _offer_run(name, str(values[name]))

    def keep(self) -> None:
        """Keep the runs that are open at the first step for the next attempts."""
        _offer.close()  # what is opened from now on is not the training's
        self._each(self._keep)

    def leave(self, status: object) -> None:
        """Mark the runs: this process stops with a status, and the training is not done."""
        self._each(lambda name, module, run: TRACKERS[name].leave(module, run, status))

    def state_dict(self) -> dict[str, int]:
        """Where Weights & Biases is in its count of rows. Offline each attempt counts from 0, and
        its rows would replace those of the one before when they are synced."""
        rows = {"wandb": self._row} if self._row else {}
        self._each(
            lambda name, _, run: name == "wandb" and rows.update(wandb=max(self._row, run.step))
        )
        return rows

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue the count: what a killed attempt logged after its last checkpoint is logged
        again, in the same rows."""
        self._row = state.get("wandb", 0)
        self._each(self._continue_rows)

    def _continue_rows(self, name: str, _: Any, run: Any) -> None:
        """The first row has the next number, unless the script numbers its rows."""
        if name != "wandb" or run.step >= self._row:
            return
        own = run._log  # wandb.log() comes here, too

        def log(data: Any, step: int | None = None, commit: bool | None = None) -> None:
            run._log = own
            if step is None:  # with a step of the script's, this would be an empty row before it
                own({}, step=self._row)
            own(data, step, commit)

        run._log = log

    def _keep(self, name: str, _: Any, run: Any) -> None:
        at_end(lambda problem: self.leave(FAILED) if problem else None)
        values, run_id = kept(self._folder), TRACKERS[name].id_of(run)
        if values.setdefault(name, run_id) != run_id:
            warning(
                f"{name} logs to run {run_id}, and earlier attempts to {values[name]}. Open it "
                "after Run(...) and before the first step; an id that the script gives has to be "
                "the same in all attempts"
            )
        elif name == "wandb" and 0 < run.step < self._row:
            warning(
                f"wandb counts rows from 0 again, and the checkpoint has {self._row}: offline, "
                "these replace earlier ones. Open it before run.resume() and the loop"
            )
        keep(self._folder, values)

    def _each(self, action: Callable[[str, Any, Any], object]) -> None:
        """Call this with name, module and run of each tracker that has a run open."""
        for name in TRACKERS if self._is_first else ():
            module = sys.modules.get(name)
            try:
                run = None if module is None else TRACKERS[name].open_run(module)
                if run is not None:
                    action(name, module, run)
            except Exception as error:  # of another package, of any kind
                warning(f"{name} failed: {error or type(error).__name__}")


def _offer_run(name: str, run_id: str) -> None:
    if name == "mlflow" and "MLFLOW_RUN_ID" not in os.environ:  # else the script's own
        os.environ["MLFLOW_RUN_ID"] = run_id
        _offer.callback(os.environ.pop, "MLFLOW_RUN_ID", None)
    if name == "wandb":  # reads its variables once, maybe before now: `wandb.login()`
        with contextlib.suppress(ImportError, AttributeError):  # a folder of that name
            import wandb

            _offer.callback(setattr, wandb, "init", wandb.init)
            wandb.init = functools.partial(_init_wandb, wandb.init, run_id)


def _init_wandb(own: Callable[..., Any], run_id: str, *args: Any, **given: Any) -> Any:
    """``wandb.init()`` that continues a run unless the script names one."""
    run_id = given.get("id") or os.environ.get("WANDB_RUN_ID") or run_id
    return own(*args, **{"resume": "allow", **given, "id": run_id})


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
