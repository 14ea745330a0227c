"""``Saves``: when a run saves, what its newest save has of its current state, and how saves are
recorded."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.saver import Saved, SaveEvent, Saver
from hydroslurm.checkpoint.store import Checkpoint, State
from hydroslurm.core.events import EventKind
from hydroslurm.errors import UnsavableState
from hydroslurm.gate.marks import Range
from hydroslurm.runtime.controller import Controller
from hydroslurm.training.attempts import CurrentAttempt, losses
from hydroslurm.training.cadence import Cadence
from hydroslurm.training.contents import Contents
from hydroslurm.training.objects import Composition, OutgrownState
from hydroslurm.training.rank_group import RankGroup, notice, warning

_OVER = (EventKind.SAVE_COMMITTED, EventKind.SAVE_FAILED, EventKind.SAVE_ABANDONED)


class Saves:
    """The saves of one rank. Its attributes are the same on all ranks, because they make the same
    calls.

    Attributes:
        unchanged: the state is that of the newest save, which may still be under way. Certain only
            as long as nothing but the run itself has had control since.
        periodic_step: of the newest periodic save, or of the checkpoint that this attempt resumed
            from. A step has one at most: a loop may call several safe points at it.
        behind_batches: the newest save is the one after the last batch of an epoch, and no step
            was counted since. A stop resumes there.
        evaluation: the state at the beginning of the current ``evaluation()`` block; without the
            objects' where these do not change in it. None outside of one.
        refused: why a stop saves nothing now, for its message; periodic saves are off, too. None
            while the state can be resumed from.
    """

    def __init__(
        self,
        contents: Contents,
        saver: Saver,
        *,
        cadence: Cadence,
        rank_group: RankGroup,
        attempt: CurrentAttempt,
    ) -> None:
        self._contents, self._saver = contents, saver
        self._cadence = cadence
        self._rank_group = rank_group
        self._attempt = attempt
        self._folder = _identity(attempt.run.root)
        self.unchanged = self.behind_batches = False
        self.periodic_step: int | None = None
        self.evaluation: State | None = None
        self.refused: str | None = None
        self._last_s = time.monotonic()

    def state(self) -> State:
        """What is saved now; within an evaluation the state from its beginning.

        Raises:
            OutgrownState: no later attempt could load it.
        """
        root = self._attempt.run.root
        looks = self._folder is not None and self._rank_group.rank == 0
        if looks and _identity(root) != self._folder:
            self._folder = None  # saves make a missing one anew; it is said once
            warning(
                f"{root} was renamed or removed while this run trains. It is made anew, and what "
                "is saved from now on goes there; what was saved before is not in it. Let a folder "
                "be until its run has ended"
            )
        contents, begun = self._contents, self.evaluation
        state = contents.capture() if begun is None else begun
        shared = state.shared or contents.objects.states()
        frozen = contents.script.frozen()
        contents.objects.require_resumable(shared)
        return State(shared, state.own, frozen=frozen)

    def place(self) -> dict[str, Any]:
        """What a manifest says of the state: its step and epoch, what the run consists of, and how
        often it saves."""
        cursor = self._contents.cursor
        step = cursor.completed_step()
        made_of = Composition(self._contents.objects.classes(), cursor.loading)
        meta = {**made_of.to_meta(), "cadence": asdict(self._cadence)}
        return {"step": step, "epoch": cursor.epoch, "meta": meta}

    def save(self, *, kind: str = "manual") -> Saved:
        """Save now, and wait until it is committed."""
        saved = self._saver.save(self.state(), kind=kind, **self.place())
        self.unchanged, self.behind_batches = True, False
        return saved

    def save_periodically(self) -> None:
        """Begin a save in the background. None may come between the end of the batches, or the
        beginning of an evaluation, and what is to be repeated from there."""
        self.restart_clock()
        step = self._contents.cursor.completed_step()
        if self.behind_batches or self.evaluation is not None or step == self.periodic_step:
            return
        if self._saver.start(self.state(), **self.place()) > 0:
            self.unchanged, self.periodic_step = True, step
            self._space(stall_s=time.monotonic() - self._last_s)

    def save_by(self, deadline_mono_s: float) -> str:
        """Save for a stop; return what came of it, as a message."""
        if self.refused is not None:
            return self.refused
        if self.behind_batches:
            return (
                f"step {self._contents.cursor.step} is committed as it was behind its last batch, "
                "and what follows the loop over batches() is done anew"
            )
        try:
            return self._saver.save_by(
                self.state,
                deadline_mono_s=deadline_mono_s,
                unchanged=self.unchanged,
                **self.place(),
            ).reason
        except OutgrownState as error:
            return f"nothing was saved, and the next attempt goes on from an older step: {error}"
        except UnsavableState as error:
            if self._contents.objects.uninitialised() is None:
                raise
            return f"nothing was saved, and nothing is lost: {error}"

    def restart_clock(self) -> None:
        """A save begins now: the next one by the clock is due so long after it."""
        self._last_s = time.monotonic()

    def make_due(self) -> None:
        """Have the clock call for a save at the next safe point, where there is one."""
        self._last_s = -math.inf

    def is_due(self) -> bool:
        """Whether to save behind this step. All ranks save at one step, and each has a clock of its
        own: the first one's counts, and calls for a save at one of the next steps."""
        if self.refused is not None:
            return False
        group, every = self._rank_group, self._cadence.every_steps
        by_step = bool(every) and self._contents.cursor.step % every == 0
        if group.world_size == 1:
            return by_step or self._cadence.is_due_by_clock(self._last_s)
        called = group.takes_save()
        if group.rank == 0 and self._cadence.is_due_by_clock(self._last_s):
            group.call_save()
        return called or by_step

    def check(self, *, is_first_here: bool) -> None:
        """Find out behind the first step what cannot be saved, and what is to be said of it.

        Args:
            is_first_here: this rank speaks for those of its node.

        Raises:
            UnsavableState: the state holds something that could be saved by pickling only.
        """
        state = self.state()
        self._rank_group.log(*self._contents.findings(state))
        refused = self._saver.reserve(state)  # plans a save of it: what cannot be saved is named
        if refused and is_first_here:
            warning(
                f"{refused}. So each save holds the training up until it is written. More memory "
                "(--mem) spares that"
            )

    def continue_from(self, checkpoint: Checkpoint) -> None:
        """The run has resumed from this one."""
        self.periodic_step = checkpoint.step
        self._saver.continues_from(checkpoint)
        self._space(stall_s=Cadence.of(checkpoint.manifest.meta).stall_s)

    def _space(self, *, stall_s: float) -> None:
        """Follow what a save costs and how often this run loses work. With several ranks it is the
        first one's clock that calls for a save, so its measurements count."""
        before, save_s = self._cadence, self._saver.expect_s()
        lost, ran_s = losses(self._attempt.history, now_epoch_ns=time.time_ns())
        self._cadence = replace(before, stall_s=stall_s, save_s=save_s, losses=lost, ran_s=ran_s)
        if self._cadence.interval_s < before.interval_s == before.every_s:
            self._rank_group.log(self._cadence.reason(), log=notice)


class SaveRecorder:
    """Gets the events of one saver, from whatever thread, and writes them into the rank's log."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._saving: dict[tuple[int, str], int] = {}
        self._committing: dict[tuple[int, str], int] = {}

    def __call__(self, event: SaveEvent) -> None:
        self._mark(event)
        self._controller.record(
            event.kind,
            {
                "checkpoint_step": event.step,
                "save_kind": event.save_kind,
                "state_bytes": event.state_bytes,
                "seconds": event.seconds,
                "reason": event.reason,
            },
            mono_ns=event.mono_ns,
        )

    def _mark(self, event: SaveEvent) -> None:
        marks = self._controller.marks
        if not marks.emitting:
            return
        save = event.step, event.save_kind  # the stop's may be beside a periodic one of its step
        if event.kind is EventKind.SAVE_STARTED:
            self._saving[save] = marks.begin(Range.SAVING, event.step)
        elif event.kind is EventKind.SAVE_WRITTEN:
            self._committing[save] = marks.begin(Range.COMMITTING, event.step)
        elif event.kind in _OVER:
            marks.end_once(self._committing, save)
            marks.end_once(self._saving, save)


def _identity(root: Path) -> tuple[int, int] | None:
    """What tells a folder from another one in its place."""
    try:
        found = root.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
