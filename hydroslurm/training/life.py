"""This life of a run: whether it may begin, when it began, and why it ends."""

from __future__ import annotations

import time

from hydroslurm.core.events import EventKind
from hydroslurm.core.fence import Fence
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.gate.marks import NO_RANGE, Emit, Range
from hydroslurm.runtime.controller import Controller
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.lives import Ending, Ledger, Limits, check_limits


class Life:
    """One start of a run: all its ranks. Written down in attempts.jsonl, by one rank for all, and
    in the events of each.

    Attributes:
        number: from 1; None before it has begun.
    """

    def __init__(
        self,
        run: RunDir,
        controller: Controller,
        *,
        limits: Limits,
        fence: Fence,
        allocation: Allocation | None,
    ) -> None:
        self.number: int | None = None
        self._ledger = Ledger(run.lives_jsonl)
        self._controller = controller
        self._limits = limits
        self._fence = fence
        self._allocation = allocation
        self._has_stepped = False
        self._marks_steps = Emit.STEPS in controller.marks.emitting
        self._stepping = NO_RANGE

    def enter(self, step: int) -> int:
        """Write down for all ranks that a life begins at a step; returns its number.

        Raises:
            RunEnded: a limit is spent, or lives pass without progress. Nothing is written down.
            StaleAttempt: a newer attempt has claimed the folder. The same.
        """
        self._check_fence("the start")
        self._ledger.set_aside_foreign()
        check_limits(self._ledger.lives(), self._limits, step=step)
        allocation = self._allocation
        return self._ledger.begin(
            step,
            now_epoch_ns=time.time_ns(),
            job_id=allocation.job_id if allocation else None,
            restart_count=allocation.restart_count if allocation else 0,
        )

    def begin(self, number: int, step: int) -> None:
        """This rank begins the life that was entered."""
        self.number = number
        self._controller.step = step
        self.record(EventKind.ATTEMPT_BEGAN, step=step)
        self._mark_step(step)

    def note_step(self, step: int, *, samples_per_step: int | None = None) -> bool:
        """Tell the events how far it is; True for the first step of this life."""
        self._controller.step = step
        if self._marks_steps:
            self._mark_step(step)
        if self._has_stepped:
            return False
        self._has_stepped = True
        self.record(EventKind.FIRST_STEP, samples_per_step=samples_per_step)
        return True

    def end(self, ending: Ending, *, step: int) -> None:
        """Write down for all ranks why it ends; nothing if it never began.

        Raises:
            StaleAttempt: a newer attempt writes this ledger now.
        """
        if self.number is not None:
            self._check_fence("the end of this life")
            self._ledger.end(self.number, ending, step=step, now_epoch_ns=time.time_ns())

    def record_end(self, ending: Ending) -> None:
        """This rank's event of it."""
        if self.number is not None:
            self.record(EventKind.ATTEMPT_ENDED, ending=ending)

    def _check_fence(self, what: str) -> None:
        try:
            self._fence.check(what)
        except OSError as error:
            raise RunFolderError(f"cannot read {self._fence.path}: {error.strerror}") from error

    def _mark_step(self, step: int) -> None:
        """NVTX: one step is over at this safe point, and the next begins."""
        marks = self._controller.marks
        marks.end(self._stepping)
        if self._marks_steps:
            self._stepping = marks.begin(Range.STEP, step + 1)

    def record(self, kind: EventKind, **data: object) -> None:
        """An event of this life's."""
        self._controller.record(kind, {"attempt": self.number, **data})
