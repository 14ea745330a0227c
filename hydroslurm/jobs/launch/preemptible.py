"""``hydroslurm.preemptible(fn)``: for those who stay with submitit's own executor.

    executor = submitit.AutoExecutor("logs")
    job = executor.submit(hydroslurm.preemptible(train), 3)

submitit 1.5 bypasses SIGTERM and, at its own signal, pickles the callable again, counts every
signal within limits of 10 minutes or less as a time-out, and lets a second signal requeue a second
time. Here the function runs with pausing installed and submitit's signal as the warning; the
:class:`~hydroslurm.training.run.Run` that it makes takes both signals over, so that nothing of
submitit's runs at them. What is pickled is the function and its arguments, never its state: a
requeue after a node failure finds the newest checkpoint like any other.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission, environment_variables

from hydroslurm.core import rundir
from hydroslurm.errors import UsageError
from hydroslurm.gate.signals import SignalPlan, signal_number
from hydroslurm.jobs.launch.rank import FOLDER_ENV, in_rank, leaving_as_submitit_does

_SUBMITIT_SIGNAL_ENV = "SUBMITIT_PREEMPT_SIGNAL"
_SUBMITIT_SIGNAL = "USR2"


@dataclass(frozen=True)
class Preemptible:
    """A callable for submitit, made by :func:`preemptible`."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if FOLDER_ENV not in os.environ:  # the debug executor, or no executor at all
            with _run_folder_for_now(), leaving_as_submitit_does():
                return self.function(*args, **kwargs)
        environment = submitit.JobEnvironment()
        run = environment.paths.folder / f"{environment.job_id}_run"
        with in_rank(Path(os.environ.get(rundir.RUN_DIR_ENV, run)), signals=_plan()):
            return self.function(*args, **kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        """What submitit asks for at its signal, where no Run has taken it over: the same call
        again."""
        return DelayedSubmission(self, *args, **kwargs)


def preemptible(function: Callable[..., Any]) -> Preemptible:
    """Wrap a function that uses :class:`hydroslurm.Run`, for ``executor.submit``.

    Its run folder is ``<submitit's folder>/<job id>_run`` unless HYDROSLURM_RUN_DIR names another.
    Pausing by SIGUSR1 and SIGUSR2 is off, because submitit uses USR2; ``scontrol suspend`` works.
    Called by submitit's debug executor, or by hand, it is the function itself, with a run folder
    that is removed after the call.

    Raises:
        UsageError: not callable.
    """
    if not callable(function):
        raise UsageError(
            f"preemptible() wants a function, got {type(function).__name__}; give it the function "
            "itself and its arguments to executor.submit()"
        )
    return Preemptible(function)


@contextlib.contextmanager
def _run_folder_for_now() -> Iterator[None]:
    """Where a Run without ``directory=`` saves while somebody debugs it."""
    if os.environ.get(rundir.RUN_DIR_ENV):
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="hydroslurm-debug-") as folder,
        environment_variables(**{rundir.RUN_DIR_ENV: folder}),
    ):
        yield


def _plan() -> SignalPlan:
    signo = signal_number(os.environ.get(_SUBMITIT_SIGNAL_ENV, _SUBMITIT_SIGNAL))
    plan = SignalPlan(user_pause=None, user_resume=None, warning=signo)
    return plan.with_environment(os.environ)
