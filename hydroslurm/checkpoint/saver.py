"""Saves the state of a run: in the background, synchronously, or before a deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from hydroslurm.checkpoint.async_save import AsyncSave, AsyncSaves
from hydroslurm.checkpoint.deadline_save import DeadlineSave
from hydroslurm.checkpoint.frozen import with_fingerprint
from hydroslurm.checkpoint.outcome import (
    Saved,
    SaveEvent,
    SaveEventKind,
    as_checkpoint_error,
    report,
)
from hydroslurm.checkpoint.planner import divide
from hydroslurm.checkpoint.save_round import PATIENCE_S, SaveRound
from hydroslurm.checkpoint.staging import Staging
from hydroslurm.checkpoint.state_writer import SaveRequest, StateWriter
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.core.garbage import without_gc
from hydroslurm.core.memory import Room, room
from hydroslurm.errors import (
    CheckpointError,
    SaveAbandoned,
    StaleAttempt,
    UsageError,
)

_NO_META: Mapping[str, Any] = {}


class Saver:
    """The saves of one rank. For the training thread; a forked child cannot use it.

    One save runs at a time. A save in the background writes a copy, so the caller may change the
    state as soon as a method returns. Without memory for a copy, the state itself is written while
    the caller waits.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        keep: int = 2,
        keep_stop: int = 2,
        keep_epochs: int | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        exempt: Callable[[], AbstractContextManager[None]] = nullcontext,
        tell: Callable[[SaveEvent], None] | None = None,
        topic: str = "save",
        patience_s: float = PATIENCE_S,
        room: Callable[[], Room] = room,
    ) -> None:
        """Reads the manifests of earlier attempts to learn how long a save takes here.

        Args:
            store: where checkpoints are kept. All of its ranks make the same calls at the same
                steps.
            keep, keep_stop, keep_epochs: how many checkpoints to keep: of other kinds, of kind
                "stop", and of kind "epoch" (None: all of them).
            on_save_error: what :meth:`poll` does about a save that failed in the background.
            exempt: makes the context in which no pause holds a thread.
            tell: receives every event, from any thread.
            topic: of this saver in the peers' agreements; unique per saver.
            patience_s: how long to wait for the others before a save begins.
            room: says how much memory copies may take.
        """
        if on_save_error not in ("warn", "fail"):
            raise UsageError(f'on_save_error is {on_save_error!r}; it must be "warn" or "fail"')
        self._peers, self._frozen = store.peers, store.frozen
        self._topic = topic
        self._patience_s = patience_s
        self._rounds = 0
        self._writer = StateWriter(
            store, keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs, tell=tell
        )
        self._on_save_error = on_save_error
        self._owner_pid = os.getpid()
        self._state = 0
        self._staging = Staging(exempt=exempt, room=room)
        self._saves = AsyncSaves(exempt=exempt, after=self._writer.prune)

    def reserve(self, state: State) -> str:
        """Allocate the memory for the copies of :meth:`start` in the background.

        Worth doing once, after the first step, when the optimizer has its state: otherwise the
        first save stalls several times longer than the others.

        Returns:
            Why there is no memory for copies; empty if there is.
        """
        self._check_ours()
        if self._saves.current() is None:
            self._staging.reserve(self._divide(state))
        return self._staging.refused

    def start(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str = "periodic",
        meta: Mapping[str, Any] = _NO_META,
    ) -> float:
        """Copy the state and save the copy in the background; without memory for a copy, save.

        While a save is under way on any rank, this one is skipped, with an event: a disk that
        cannot keep up must not hold up the training. The ranks agree on that in the background too:
        none waits here for another one.

        Returns:
            How long the training stalled, in seconds; 0.0 if no save was started.

        Raises:
            UnsavableState: the state holds what cannot be saved. Of several ranks, :meth:`poll`
                raises it on all.
        """
        self._check_ours()
        begin_s = time.monotonic()
        save_round = self._next_round(step)
        request = SaveRequest(step, kind, epoch, meta, topic=save_round.topic)
        under_way = self._saves.current()
        if under_way is not None:
            if save_round.is_solo:
                reason = save_round.busy(under_way.request.step)
                self._writer.tell(SaveEventKind.SKIPPED, request, reason=reason or "")
            else:
                self._excuse(save_round, request, busy=under_way.request.step)
            return 0.0
        try:
            with without_gc():
                plan = self._plan(state)
                request = replace(request, state=self._new_state(), state_bytes=plan.state_bytes)
                self._writer.tell(SaveEventKind.STARTED, request)
                staged = self._stage(plan, request)
        except BaseException as error:  # of which the others must hear
            if save_round.is_solo:
                raise
            self._excuse(save_round, request, problem=error)
            if not isinstance(error, Exception):
                raise
            return 0.0
        save = self._launch(staged, request, save_round)
        if staged is plan:
            save.see_through()
        return time.monotonic() - begin_s

    def save(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str = "manual",
        meta: Mapping[str, Any] = _NO_META,
        again: bool = True,
    ) -> Saved:
        """Save, and return once it is committed. A save under way is waited for first.

        Args:
            again: False if any checkpoint of this step will do; kind "epoch" and other kinds do not
                stand in for each other.

        Raises:
            UnsavableState: the state holds what cannot be saved.
            SaveFailed: it could not be written; earlier checkpoints are intact.
        """
        self._check_ours()
        save_round = self._next_round(step)
        try:
            plan = self._plan(state)
            number = self._new_state()
            request = SaveRequest(
                step, kind, epoch, meta, plan.state_bytes, save_round.topic, number, again
            )
        except BaseException as error:
            save_round.decline(error)
            raise
        self._saves.wait()
        self._writer.tell(SaveEventKind.STARTED, request)
        save = self._launch(plan, request)
        save.see_through()
        if save.failure is not None:
            self._saves.forget(save)
            raise as_checkpoint_error(save.failure, step)
        return Saved(
            step=step,
            is_committed=True,
            checkpoint=self._writer.newest,
            steps_at_risk=0,
            reason=f"step {step} is committed",
        )

    def save_by(
        self,
        state: State | Callable[[], State],
        *,
        step: int,
        epoch: int = 0,
        deadline_mono_s: float,
        kind: str = "stop",
        meta: Mapping[str, Any] = _NO_META,
        unchanged: bool = False,
    ) -> Saved:
        """Save for a stop whatever can still be committed in time (see ``deadline.choose``).

        Returns when the step is committed, when that has failed, or at the deadline
        (``time.monotonic()``). A failed save does not raise; it is reported in ``Saved.reason``,
        and the rest of the grace belongs to the caller.

        No copy is made: until a save that is ``still_writing`` has ended (:meth:`wait`,
        :meth:`close`), the state must not change.

        Args:
            unchanged: the state is certainly that of the newest save, or the one that the run
                resumed from: do not save it again. The same on all ranks.

        Raises:
            UnsavableState: the state holds what cannot be saved. A save under way was waited for.
        """
        self._check_ours()
        save_round = self._next_round(step)
        try:
            plan = self._plan(state() if callable(state) else state)
            number = self._state if unchanged else self._new_state()
            request = SaveRequest(
                step, kind, epoch, meta, plan.state_bytes, save_round.topic, number
            )
        except BaseException as error:
            self._saves.wait(deadline_mono_s - time.monotonic())
            save_round.settle("situation", problem=error)
            raise
        stop = DeadlineSave(self._writer, self._saves, save_round, request, deadline_mono_s)
        return stop.carry_out(plan)

    def give_up(self) -> None:
        """Abandon the save under way: stop waiting for ranks that will not come."""
        if self._ours:
            self._saves.give_up()

    def poll(self) -> None:
        """Report each failure in the background since the last call once.

        Warnings:
            RuntimeWarning: a save failed and ``on_save_error`` is "warn"; or something minor did,
                such as the removal of an old checkpoint.

        Raises:
            SaveFailed: a save failed and ``on_save_error`` is "fail".
            StaleAttempt: a newer attempt has begun.
            UnsavableState: the state of a rank holds what cannot be saved.
        """
        # nearly always there is nothing, and this comes at every step: no call, no getpid()
        if not (self._saves.unreported or self._writer.problems) or not self._ours:
            return
        failures, problems = self._saves.failures(), self._writer.take_problems()
        if failures or problems:
            report(failures, problems=problems, on_save_error=self._on_save_error)

    def wait(self, *, timeout_s: float | None = None) -> bool:
        """Wait until no save is under way; whether that is so within the timeout."""
        return not self._ours or self._saves.wait(timeout_s)

    def close(self) -> None:
        """Wait for the save under way, then report like :meth:`poll`."""
        if not self._ours:
            return
        self._staging.join()
        self._saves.wait()
        self.poll()

    def expect_s(self) -> float:
        """How long saving a state of the last one's size should take, in seconds."""
        return self._writer.expect_s()

    @property
    def durable_step(self) -> int | None:
        """The newest step that this attempt has committed, or else the one that it resumed
        from."""
        return self._writer.durable_step()

    @property
    def is_durable(self) -> bool:
        """Whether the state that was passed last is committed."""
        return self._writer.is_durable(self._state)

    def continues_from(self, checkpoint: Checkpoint) -> None:
        """Note what the state was loaded from: there is nothing to save until it changes, and what
        is frozen in it need not be saved again."""
        self._writer.continues_from(checkpoint)

    @property
    def _ours(self) -> bool:
        return os.getpid() == self._owner_pid

    def _check_ours(self) -> None:
        if not self._ours:
            raise UsageError(
                f"this Saver belongs to process {self._owner_pid}, from which this one, "
                f"{os.getpid()}, was forked; only the process that trains can save"
            )

    def _new_state(self) -> int:
        """The number of the state that is passed now."""
        self._state += 1
        return self._state

    def _next_round(self, step: int) -> SaveRound:
        """The agreements of the next call; all ranks make their calls in the same order."""
        self._rounds += 1
        topic = f"{self._topic}/{self._rounds}"
        return SaveRound(self._peers, topic, step=step, timeout_s=self._patience_s)

    def _divide(self, state: State) -> WritePlan:
        """The one walk over the state that a save makes; raises UnsavableState."""
        return divide(state, rank=self._peers.rank, world_size=self._peers.world_size)

    def _plan(self, state: State) -> WritePlan:
        """The write plan of a save, with whether what is frozen need be written."""
        plan = with_fingerprint(self._divide(state))
        return replace(plan, is_stored=not plan.frozen or self._frozen.have(plan))

    def _stage(self, plan: WritePlan, request: SaveRequest) -> WritePlan:
        """A copy; ``plan`` itself where there is no memory for one."""
        begin_s = time.monotonic()
        copied = self._staging.copy(plan)
        if copied is None:
            self._writer.tell(SaveEventKind.NOT_COPIED, request, reason=self._staging.refused)
            return plan
        seconds = time.monotonic() - begin_s
        self._writer.tell(SaveEventKind.STAGED, request, seconds=seconds)
        return copied

    def _launch(
        self, plan: WritePlan, request: SaveRequest, save_round: SaveRound | None = None
    ) -> AsyncSave:
        """Save in the background, if the ranks of ``save_round`` agree to begin."""

        def work(cancel: threading.Event) -> None:
            if save_round is None or self._may_begin(replace(save_round, cancel=cancel), request):
                self._writer.write(plan, request, cancel=cancel)

        expected_s = self._writer.expect_s(request.state_bytes)
        return self._saves.launch(work, request, expected_s=expected_s)

    def _excuse(
        self,
        save_round: SaveRound,
        request: SaveRequest,
        *,
        busy: int | None = None,
        problem: BaseException | None = None,
    ) -> None:
        """Tell the other ranks in the background that this one cannot begin."""

        def work(cancel: threading.Event) -> None:
            self._may_begin(replace(save_round, cancel=cancel), request, busy=busy, problem=problem)

        self._saves.launch(work, request, expected_s=0.0, writes=False)

    def _may_begin(
        self,
        save_round: SaveRound,
        request: SaveRequest,
        *,
        busy: int | None = None,
        problem: BaseException | None = None,
    ) -> bool:
        """Whether all ranks can begin this save, which all of them are told alike.

        Raises:
            SaveFailed, UnsavableState, SaveAbandoned: one cannot take part, is gone or has given
                up.
        """
        try:
            reason = save_round.busy(busy, problem=problem)
        except (CheckpointError, StaleAttempt) as error:
            given_up = isinstance(error, SaveAbandoned)
            kind = SaveEventKind.ABANDONED if given_up else SaveEventKind.FAILED
            self._writer.tell(kind, request, reason=str(error))
            raise
        if reason is not None:
            self._writer.tell(SaveEventKind.SKIPPED, request, reason=reason)
        return reason is None
