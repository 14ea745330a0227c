"""The outcome of a save: its events, its result, and how failures are reported."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hydroslurm.checkpoint.store import Checkpoint
from hydroslurm.core.events import EventKind
from hydroslurm.errors import (
    CheckpointError,
    SaveAbandoned,
    SaveFailed,
    StaleAttempt,
    UnsavableState,
)


@dataclass(frozen=True)
class SaveEvent:
    """One thing that happened to one save.

    Attributes:
        kind: what happened: one of ``SAVE_...``.
        mono_ns: when, CLOCK_MONOTONIC, nanoseconds.
        step: whose state it is.
        save_kind: ``periodic``, ``stop``, ``manual`` or ``epoch``.
        state_bytes: size of its tensors.
        seconds: of SAVE_STAGED, how long the training stalled; of SAVE_WRITTEN, how long until this
            rank's part was on the disk, so that only the commit was left; of SAVE_COMMITTED,
            SAVE_FAILED and SAVE_ABANDONED, how long it took; else 0.
        reason: why it was skipped, failed, given up or not copied; for people.
    """

    kind: EventKind
    mono_ns: int
    step: int
    save_kind: str
    state_bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class Saved:
    """What has become of a save by the time its caller continues.

    Attributes:
        step: whose state was to be saved.
        is_committed: that state is committed. If not, the last good checkpoint stays.
        checkpoint: the newest one, if any: of that state if it is committed.
        steps_at_risk: steps since the newest checkpoint, which would be lost now. 0 also if that is
            an earlier save of the same step.
        reason: what was chosen and what came of it, for people.
        still_writing: a save continues in the background. It can still be committed while
            the process lives (``Saver.wait``), and an interpreter that shuts down waits for it. It
            reads the state itself: leave that alone until then.
    """

    step: int
    is_committed: bool
    checkpoint: Checkpoint | None
    steps_at_risk: int
    reason: str
    still_writing: bool = False


def report(
    failures: Iterable[BaseException],
    *,
    problems: Iterable[str],
    on_save_error: Literal["warn", "fail"],
) -> None:
    """Report failed saves, except those given up on purpose, and minor problems.

    Raises:
        SaveFailed: a save failed and ``on_save_error`` is "fail"; otherwise a RuntimeWarning.
        StaleAttempt: no save of this attempt will be committed any more.
        UnsavableState: the state of a rank holds what cannot be saved.
    """
    failures = [one for one in failures if not isinstance(one, SaveAbandoned)]
    for problem in problems:
        _warn(problem)
    for failure in failures:
        if isinstance(failure, (StaleAttempt, UnsavableState)):
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
