"""What a job consists of: groups, functions in them, and the commonest stop signal."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from hydroslurm.errors import UsageError

if TYPE_CHECKING:
    from hydroslurm.session.job import Job


class Group(str, Enum):
    """The groups of a job, in the order in which they run."""

    DOWNLOAD = "download"
    BUILD = "build"
    INIT = "init"
    EPOCH = "epoch"
    EXIT = "exit"


@dataclass(frozen=True)
class Part:
    """One function of a job. ``takes_job``: it has a parameter, which is given the job."""

    name: str
    function: Callable[..., Any]
    takes_job: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Part:
        """Look at a function.

        Raises:
            UsageError: not callable, or it needs more than the job.
        """
        if not callable(function):
            raise UsageError(f"a job consists of functions, not of {type(function).__name__}")
        name = name_of(function)
        return cls(name, function, _takes_job(function, name))

    def __call__(self, job: Job) -> Any:
        return self.function(job) if self.takes_job else self.function()


@dataclass(frozen=True)
class EpochLimit:
    """True when so many epochs are done. Made by :func:`epoch_limiter`; can be pickled."""

    epochs: int

    def __call__(self, job: Job) -> bool:
        return job.run.epoch >= self.epochs


def epoch_limiter(epochs: int) -> EpochLimit:
    """A stop signal that ends a job when so many epochs are done.

        job.add_stop_signal(hydroslurm.epoch_limiter(10))

    Raises:
        UsageError: not a whole number of 1 or more.
    """
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        raise UsageError(f"epoch_limiter({epochs!r}): wanted a whole number of 1 or more")
    return EpochLimit(epochs)


def name_of(function: Any) -> str:
    """What a function is called in messages."""
    return str(getattr(function, "__name__", None) or type(function).__name__)


def _takes_job(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):  # some builtins do not tell
        return False
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    by_keyword = any(
        parameter.kind is parameter.KEYWORD_ONLY and parameter.name in needed
        for parameter in parameters
    )
    if len(needed) > 1 or by_keyword:
        raise UsageError(
            f"{name} needs {', '.join(needed)}; a job calls its functions with itself, or with "
            "nothing. Bind the rest with functools.partial"
        )
    return len(needed) == 1
