"""What a job consists of: its groups, its stop signals, and the session that runs it here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hydroslurm.compat.tasks import TaskGroup
from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from hydroslurm.compat.job import Job


class Group(str, Enum):
    """The groups of a job, in the order in which they run."""

    DOWNLOAD = "download"
    BUILD = "build"
    INIT = "init"
    EPOCH = "epoch"
    EXIT = "exit"


class LocalSession:
    """Runs groups in this process.

    It remembers whose group it ran last, as Caffe2's has that job's blobs in its workspace: what a
    manager saves and loads by it belongs to that job.
    """

    def __init__(self) -> None:
        self._job: Job | None = None

    @classmethod
    def compile(cls, group: TaskGroup) -> TaskGroup:
        """The same group: a function needs no preparation to run here."""
        return group

    def run(self, runnable: Callable[[], Any]) -> Any:
        """Call it."""
        if isinstance(runnable, TaskGroup) and runnable.job is not None:
            self._job = runnable.job
        with nullcontext() if self._job is None else self._job.as_current():
            return runnable()


@dataclass(frozen=True)
class ValueSignal:
    """A stop signal that is no function: a number, a flag, or a tensor of one element."""

    value: Any

    @classmethod
    def of(cls, value: Any) -> ValueSignal:
        """Raises:
        UsageError: it is neither true nor false, or would always be true.
        """
        try:
            if isinstance(value, (bool, int, float)) or hasattr(value, "is_set"):
                return cls(value)
            value.item()
        except (AttributeError, RuntimeError, ValueError) as error:
            raise UsageError(
                f"add_stop_signal({type(value).__name__}): wanted a function, the output of a "
                "task, a number, a flag (threading.Event), or a tensor of one element"
            ) from error
        return cls(value)

    def __call__(self) -> bool:
        return bool(self.value.is_set() if hasattr(self.value, "is_set") else self.value)


@dataclass(frozen=True)
class EpochLimit:
    """True when so many epochs are done. Made by :func:`epoch_limiter`; can be pickled."""

    epochs: int

    def __call__(self, job: Job) -> bool:
        return job.run.epoch >= self.epochs


def epoch_limiter(epochs: int) -> EpochLimit:
    """A stop signal that ends a job when so many epochs are done.

        job.add_stop_signal(hydroslurm.epoch_limiter(10))

    Within ``with Job()`` it adds itself to that job, as Caffe2's does; adding it again changes
    nothing.

    Raises:
        UsageError: not a whole number of 1 or more.
    """
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise UsageError(f"epoch_limiter({epochs!r}): wanted a whole number of 1 or more")
    from hydroslurm.compat.job import innermost_job  # which needs the tasks above

    limit = EpochLimit(epochs)
    job = innermost_job()
    if job is not None and not job.is_running:
        job.add_stop_signal(limit)
    return limit
