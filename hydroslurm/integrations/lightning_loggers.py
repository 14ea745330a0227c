"""One logical run in the loggers: all attempts write into one version, under one id, and nothing is
written twice.

TensorBoard's and the CSV logger's version of the first attempt, and its id of Weights & Biases, are
kept in the run's folder. What an attempt has logged behind the step that the next one goes on from
is taken out (CSV), hidden (TensorBoard's ``purge_step``) or replaced (Weights & Biases, offline).
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.gate.signals import SignalPlan
from hydroslurm.integrations.one_run import LoggedRows, keep, kept, new_id
from hydroslurm.runtime.out_of_reach import OutOfReach

_VERSIONED = ("TensorBoardLogger", "CSVLogger")
_ASIDE = ".earlier"


class Loggers:
    """The loggers of one trainer.

    Args:
        trainer: before its loggers have opened anything.
        folder: of the run.
        anew: there is to be no run of earlier attempts (``resume=False``).
    """

    def __init__(self, trainer: Any, folder: Path, *, anew: bool = False) -> None:
        self._trainer = trainer
        self._wandb = LoggedRows(lambda: [one.experiment for one in self._of("WandbLogger")])
        earlier = {} if anew else kept(folder)
        versions = dict(earlier)
        for place, logger in enumerate(trainer.loggers):
            if type(logger).__name__ in _VERSIONED and logger._version is None:
                if str(place) in versions:
                    logger._version = versions[str(place)]
                elif trainer.is_global_zero:
                    versions[str(place)] = logger.version
            elif type(logger).__name__ == "WandbLogger" and logger._id is None:
                if str(place) not in versions and trainer.is_global_zero:
                    versions[str(place)] = new_id()
                logger._id = versions.get(str(place))
                logger._wandb_init.update(id=logger._id, resume="allow")
                if trainer.is_global_zero:
                    _open_out_of_reach(logger)
        if trainer.is_global_zero and versions != earlier:
            keep(folder, versions)
        for logger in self._csv() if earlier else ():
            metrics = _metrics(logger)
            if metrics.exists():  # the logger removes what is there when it opens
                metrics.replace(f"{metrics}{_ASIDE}")

    def opened(self) -> None:
        """The loggers have been opened: what earlier attempts have written is put back."""
        for logger in self._csv():
            metrics = _metrics(logger)
            aside = Path(f"{metrics}{_ASIDE}")
            if aside.exists():
                aside.replace(metrics)
                logger.experiment.metrics_keys = _header(metrics)

    def state_dict(self) -> dict[str, Any]:
        """What is logged by now is written, too: the attempt that goes on from here does not log it
        again, and this one may be killed."""
        for logger in self._csv():
            logger.save()
        for logger in self._of("TensorBoardLogger"):
            logger.experiment.flush()
        return {
            "wandb": self._wandb.state_dict(),
            "rows": {
                str(place): len(_rows(_metrics(logger))) for place, logger in enumerate(self._csv())
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for place, logger in enumerate(self._csv()):
            _cut(_metrics(logger), state["rows"].get(str(place), 0))
        self._wandb.load_state_dict(state["wandb"])
        step = self._trainer.fit_loop.epoch_loop._batches_that_stepped + 1
        for logger in self._of("TensorBoardLogger"):
            logger.experiment.close()
            logger._kwargs["purge_step"] = step
            logger._experiment = None  # opened again by whoever logs next

    def _csv(self) -> Iterator[Any]:
        return self._of("CSVLogger")

    def _of(self, kind: str) -> Iterator[Any]:
        """Those that write: of the first rank."""
        if self._trainer.is_global_zero:
            yield from (one for one in self._trainer.loggers if type(one).__name__ == kind)


def _open_out_of_reach(logger: Any) -> None:
    """Loggers are opened before there is a Run, and so before the rank's children are safe, unless
    ``HYDROSLURM_PREEMPT`` is set."""
    plan = SignalPlan().with_environment(os.environ)
    reach = OutOfReach(plan.stopping() | plan.killing())
    reach.install()
    try:
        _ = logger.experiment
    finally:
        reach.uninstall()


def _metrics(logger: Any) -> Path:
    return Path(logger.log_dir) / "metrics.csv"


def _rows(metrics: Path) -> list[dict[str, str]]:
    if not metrics.exists():
        return []
    with metrics.open(newline="") as file:
        return list(csv.DictReader(file))


def _header(metrics: Path) -> list[str]:
    with metrics.open(newline="") as file:
        return next(csv.reader(file), [])


def _cut(metrics: Path, rows: int) -> None:
    """Keep this many rows."""
    found = _rows(metrics)
    if len(found) <= rows:
        return
    header, new = _header(metrics), metrics.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=header)
        writer.writeheader()
        writer.writerows(found[:rows])
    new.replace(metrics)
