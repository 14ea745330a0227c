"""How a saver tells what went wrong in the background."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Literal

from hydroslurm.errors import CheckpointError, SaveAbandoned, SaveFailed, StaleAttempt


def report(
    failures: Iterable[BaseException],
    *,
    problems: Iterable[str],
    on_save_error: Literal["warn", "fail"],
) -> None:
    """Tell of saves that failed, unless they were given up on purpose, and of problems beside them.

    Raises:
        SaveFailed: a save failed and ``on_save_error`` is "fail"; else that is a RuntimeWarning.
        StaleAttempt: no save of this attempt will ever be committed again.
    """
    failures = [one for one in failures if not isinstance(one, SaveAbandoned)]
    for problem in problems:
        _warn(problem)
    for failure in failures:
        if isinstance(failure, StaleAttempt):
            raise failure
    if not failures:
        return
    message = (
        f"a save in the background failed: {'; '.join(str(one) for one in failures)}. "
        "What was committed before is whole"
    )
    if on_save_error == "fail":
        raise SaveFailed(message) from failures[0]
    _warn(f"{message}, the training goes on, and the next save is tried as usual")


def as_checkpoint_error(failure: BaseException, step: int) -> BaseException:
    """The failure itself when it says what is wrong with the checkpoint."""
    if isinstance(failure, (CheckpointError, StaleAttempt)):
        return failure
    error = SaveFailed(f"step {step} was not saved: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def _warn(text: str) -> None:
    warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=4)
