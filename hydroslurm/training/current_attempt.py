"""The attempt this process is part of: whether it may begin, when it began, and why it ends."""

from __future__ import annotations

import time

from hydroslurm.core.events import EventKind
from hydroslurm.core.fence import Fence
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.gate.marks import NO_RANGE, Emit, Range
from hydroslurm.runtime.controller import Controller
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.attempts import AttemptLog, Ending, Limits, check_limits


class CurrentAttempt:
    """One start of a run, with all its ranks. One rank records it in attempts.jsonl for all; each
    rank records it in its own events.

    Attributes:
        number: from 1; None before it has begun.
        step: the last one that is complete.
    """

    def __init__(
        self,
        run: RunDir,
        controller: Controller,
        *,
        limits: Limits,
        fence: Fence,
        allocation: Allocation | None,
        at_least: int = 1,
    ) -> None:
        """``at_least``: the smallest number that it may get."""
        self.number: int | None = None
        self.step = 0
        self._log = AttemptLog(run.attempts_jsonl)
        self._controller = controller
        self._limits = limits
        self._fence = fence
        self._allocation = allocation
        self._at_least = at_least
        self._has_stepped = False
        self._marks_steps = Emit.STEPS in controller.marks.emitting
        self._stepping = NO_RANGE

    def enter(self, step: int) -> int:
        """Record for all ranks that an attempt begins at a step; returns its number.

        Raises:
            RunEnded: a limit is spent, or attempts make no progress. Nothing is recorded.
            StaleAttempt: a newer attempt has claimed the folder. Nothing is recorded.
        """
        self._check_fence("the start")
        self._log.set_aside_foreign()
        check_limits(self._log.attempts(), self._limits, step=step)
        allocation = self._allocation
        return self._log.begin(
            step,
            now_epoch_ns=time.time_ns(),
            job_id=allocation.job_id if allocation else None,
            restart_count=allocation.restart_count if allocation else 0,
            at_least=self._at_least,
        )

    def begin(self, number: int, step: int) -> None:
        """Begin, on this rank, the attempt that was entered."""
        self.number = number
        self.step = self._controller.step = step
        self.record(EventKind.ATTEMPT_BEGAN, step=step)
        self._mark_step(step)

    def note_step(self, step: int) -> bool:
        """Pass the step on to events and NVTX; True for the first step of this attempt."""
        self.step = self._controller.step = step
        if self._marks_steps:
            self._mark_step(step)
        is_first, self._has_stepped = not self._has_stepped, True
        return is_first

    def end(self, ending: Ending, *, step: int) -> None:
        """Record for all ranks why it ends; does nothing if it never began.

        Raises:
            StaleAttempt: a newer attempt writes this log now.
        """
        if self.number is not None:
            self._check_fence("the end of this attempt")
            self._log.end(self.number, ending, step=step, now_epoch_ns=time.time_ns())

    def record_end(self, ending: Ending) -> None:
        """Record the end in this rank's events."""
        if self.number is not None:
            self.record(EventKind.ATTEMPT_ENDED, ending=ending)

    def record(self, kind: EventKind, **data: object) -> None:
        """Record an event of this attempt."""
        self._controller.record(kind, {"attempt": self.number, **data})

    def _check_fence(self, what: str) -> None:
        try:
            self._fence.check(what)
        except OSError as error:
            raise RunFolderError(f"cannot read {self._fence.path}: {error.strerror}") from error

    def _mark_step(self, step: int) -> None:
        """NVTX: one step ends at this safe point, and the next begins."""
        marks = self._controller.marks
        marks.end(self._stepping)
        if self._marks_steps:
            self._stepping = marks.begin(Range.STEP, step + 1)
