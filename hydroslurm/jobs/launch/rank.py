"""What submitit runs in each rank: pausing is installed first, then the user's code runs.

These values are pickled at submission and called in the rank, after submitit has installed its own
handlers for SIGTERM, SIGCONT and its preemption signal. Ours go in after them and chain to them.

:class:`InRank` wraps what our own executor submits; :func:`preemptible` is for submitit's::

    executor = submitit.AutoExecutor("logs")
    job = executor.submit(hydroslurm.preemptible(train), 3)

submitit 1.5 bypasses SIGTERM and, at its own signal, pickles the callable again, counts every
signal within limits of 10 minutes or less as a time-out, and lets a second signal requeue a second
time. Here its signal is the warning, and the :class:`~hydroslurm.training.run.Run` that the
function makes takes both signals over. The function and its arguments are pickled, never its state:
a requeue after a node failure finds the newest checkpoint like any other.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import submitit
from submitit import JobEnvironment
from submitit.core.utils import (
    DelayedSubmission,
    UncompletedJobError,
    environment_variables,
)
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hydroslurm.coordination.world import INCARNATION_ENV, LOOPBACK
from hydroslurm.core import rundir
from hydroslurm.core.exitcodes import RUN_AGAIN, ExitForRequeue
from hydroslurm.core.submitit_job import FOLDER_ENV, executor_of
from hydroslurm.errors import LaunchError, UsageError
from hydroslurm.runtime.autoload import PREEMPT_ENV, adapt

SUBMITIT_SIGNAL = "URG"
"""submitit's preemption signal, instead of USR2: Slurm accepts it, and a process without a handler
ignores it."""


@dataclass(frozen=True)
class InRank:
    """A callable that is pausable from its first operator on.

    Attributes:
        function: the user's.
        root: the run folder; for a task of a job array, the folder with those of all tasks.
        is_array: whether this is a task of an array.
    """

    function: Callable[..., Any]
    root: Path
    is_array: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_rank(self.run_dir(os.environ)):
            return self.function(*args, **kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission | None:
        """Called by submitit at its signal, unless a ``Run`` has taken that over.

        A function with its own ``checkpoint`` decides what runs next (None: nothing); any other is
        called again as it was.
        """
        own = getattr(self.function, "checkpoint", None)
        if own is None:
            return DelayedSubmission(self, *args, **kwargs)
        following: DelayedSubmission | None = own(*args, **kwargs)
        if following is not None:
            following.function = replace(self, function=following.function)
        return following

    def run_dir(self, environ: Mapping[str, str]) -> Path:
        """The run folder of the rank with this environment."""
        if not self.is_array:
            return self.root
        return self.root / environ["SLURM_ARRAY_TASK_ID"]


@dataclass(frozen=True)
class Script:
    """A Python script or module, run as if by ``python``.

    Attributes:
        target: the script's path, or the module's name.
        arguments: what comes after it on the command line.
        is_module: ``python -m`` instead of ``python``.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        return self.target if self.is_module else Path(self.target).stem

    def __call__(self) -> None:
        """Run it; a non-zero exit status ends the rank with the same status.

        Raises:
            LaunchError: the script is not visible on this node.
        """
        if not self.is_module and not Path(self.target).is_file():
            raise LaunchError(
                f"the script {self.target} is not visible on this node; put it on a file system "
                "that all nodes share"
            )
        sys.argv = [self.target, *self.arguments]
        try:
            if self.is_module:
                sys.path.insert(0, str(Path.cwd()))
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, str(Path(self.target).resolve().parent))
                runpy.run_path(self.target, run_name="__main__")
        except SystemExit as leaving:
            # submitit takes any SystemExit for an interrupted job, but exit(0) is a success
            if leaving.code not in (0, None):
                raise


@contextlib.contextmanager
def in_rank(run: Path) -> Iterator[None]:
    """Inside the block this process can be paused, and its events and checkpoints go into this run
    folder. A process that is pausable already, as with submitit's debug executor, stays as it
    is."""
    from hydroslurm.runtime.install import gives_way, installed, is_installed

    is_mine = not is_installed() or gives_way()
    with contextlib.ExitStack() as stack:
        named = rundir.variables_of(run, os.environ)
        stack.enter_context(environment_variables(**named, **_torch_ranks()))
        if is_mine:
            stack.enter_context(installed(run_dir=run))
        stack.enter_context(leaving_as_submitit_does())
        yield


@contextlib.contextmanager
def leaving_as_submitit_does() -> Iterator[None]:
    """Without Slurm, which would restart the rank, translate the exit of a Run for submitit.

    Raises:
        UncompletedJobError: this process is not the job's own (debug executor, or no executor) and
            must not end.
    """
    try:
        yield
    except SystemExit as leaving:
        if leaving.code == RUN_AGAIN and executor_of(os.environ) == "local":
            raise SystemExit(LOCAL_REQUEUE_RETURN_CODE) from leaving
        if isinstance(leaving, ExitForRequeue) and not _is_job():
            raise UncompletedJobError(
                f"the run exited with status {leaving.code}, which would end a process of the job; "
                "this process is not one. Its last messages say why"
            ) from leaving
        raise


def _is_job() -> bool:
    """Whether this is a process of a job of submitit's: not below its debug executor, or called
    without one, in a job that such a job has submitted, too."""
    return FOLDER_ENV in os.environ and bool(executor_of(os.environ))


def _torch_ranks() -> dict[str, str]:
    """The ranks of submitit's local executor in the variables that torch and we read; Slurm sets
    its own."""
    if executor_of(os.environ) != "local":
        return {}
    job = JobEnvironment()
    return {
        "RANK": str(job.global_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.num_tasks),
        "MASTER_ADDR": LOOPBACK,
        INCARNATION_ENV: f"submitit {job.job_id}",
    }


@dataclass(frozen=True)
class Preemptible:
    """A callable for submitit, created by :func:`preemptible`."""

    function: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_job():
            with _run_folder_for_now(), leaving_as_submitit_does():
                return self.function(*args, **kwargs)
        environment = submitit.JobEnvironment()
        run = environment.paths.folder / f"{environment.job_id}_run"
        mode = os.environ.get(PREEMPT_ENV) or "requeue"
        with (
            environment_variables(**{PREEMPT_ENV: mode}),
            in_rank(Path(rundir.named_in(os.environ) or run)),
        ):
            if mode == "requeue":
                adapt()
            return self.function(*args, **kwargs)

    def checkpoint(self, *args: Any, **kwargs: Any) -> DelayedSubmission:
        """Called by submitit at its signal, unless a Run has taken that over: the same call
        again."""
        return DelayedSubmission(self, *args, **kwargs)


def preemptible(function: Callable[..., Any]) -> Preemptible:
    """Wrap a function that trains in a :class:`hydroslurm.Run`, or with the Trainer of Lightning or
    of Hugging Face, for ``executor.submit``.

    Its run folder is ``<submitit's folder>/<job id>_run`` unless HYDROSLURM_RUN_DIR names another.
    Pausing by SIGUSR1 and SIGUSR2 is off, because submitit uses USR2; ``scontrol suspend`` works.
    With submitit's debug executor, or called directly, it just calls the function, with a run
    folder that is removed afterwards.

    Raises:
        UsageError: not callable.
    """
    if not callable(function):
        raise UsageError(
            f"preemptible() wants a function, got {type(function).__name__}; pass it the function, "
            "and the arguments to executor.submit()"
        )
    return Preemptible(function)


@contextlib.contextmanager
def _run_folder_for_now() -> Iterator[None]:
    """A temporary run folder for a Run without ``directory=`` that is being debugged."""
    if rundir.named_in(os.environ):
        yield
        return
    with (
        tempfile.TemporaryDirectory(prefix="hydroslurm-debug-") as folder,
        environment_variables(**{rundir.RUN_DIR_ENV: folder}),
    ):
        yield
