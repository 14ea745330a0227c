"""Saves the state of a run: beside the training, at once, or before a deadline."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from hydroslurm.checkpoint.accord import Accord, Call, check_peers
from hydroslurm.checkpoint.async_save import AsyncSave, Flights
from hydroslurm.checkpoint.commit_vote import PATIENCE_S
from hydroslurm.checkpoint.copies import Copies
from hydroslurm.checkpoint.deadline_save import DeadlineSave
from hydroslurm.checkpoint.estimate import Estimate
from hydroslurm.checkpoint.memory import Room, room
from hydroslurm.checkpoint.outcome import Saved, SaveEvent, SaveEventKind
from hydroslurm.checkpoint.peers import Peers
from hydroslurm.checkpoint.reporting import as_checkpoint_error, report
from hydroslurm.checkpoint.staging import state_bytes
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.checkpoint.tiered_writer import SaveRequest, TieredWriter
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.errors import SaveFailed, UnsavableState, UsageError

_NO_META: Mapping[str, Any] = {}


class Saver:
    """The saves of one rank. For the thread that trains; a forked child has no use of it.

    One save is under way at a time. A save in the background writes a copy, so that the state is
    the caller's own again whenever a method has returned. Where there is no memory for a copy, the
    state itself is written while the caller waits.
    """

    def __init__(
        self,
        durable: CheckpointStore,
        *,
        fast: CheckpointStore | None = None,
        keep: int = 2,
        keep_stop: int = 2,
        keep_epochs: int | None = None,
        on_save_error: Literal["warn", "fail"] = "warn",
        exempt: Callable[[], AbstractContextManager[None]] = nullcontext,
        tell: Callable[[SaveEvent], None] | None = None,
        peers: Peers | None = None,
        topic: str = "save",
        patience_s: float = PATIENCE_S,
        room: Callable[[], Room] = room,
        meta: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Reads the manifests of earlier lives, to know how long a save takes here.

        Args:
            durable: where checkpoints are kept.
            fast: a quicker place, written first; what it promises is in ``Tier.promise``.
            keep, keep_stop, keep_epochs: how many checkpoints stay there: of other kinds, of kind
                "stop", and of kind "epoch" (None: all of them).
            on_save_error: what :meth:`poll` does about a save that failed in the background.
            exempt: makes the context in which no pause holds a thread.
            tell: gets every event, from whatever thread.
            peers: those of ``durable``; every rank makes the same calls at the same steps then.
            topic: of this saver in their agreements; each saver has its own.
            patience_s: how long the others are waited for before a save begins.
            room: says how much memory may be taken for copies.
            meta: what every manifest keeps beside the ``meta`` of its save.
        """
        if on_save_error not in ("warn", "fail"):
            raise UsageError(f'on_save_error is {on_save_error!r}; it must be "warn" or "fail"')
        check_peers(peers, durable=durable, fast=fast)
        self._accord = Accord(durable.peers, topic=topic, patience_s=patience_s)
        self._committer = TieredWriter(
            durable,
            fast=fast,
            keep=keep,
            keep_stop=keep_stop,
            keep_epochs=keep_epochs,
            tell=tell,
            room=room,
        )
        self._on_save_error = on_save_error
        self._meta = meta
        self._owner_pid = os.getpid()
        self._state = 0
        self._copies = Copies(exempt=exempt, room=room)
        self._refused: list[BaseException] = []
        self._flights = Flights(exempt=exempt, after=self._committer.prune)

    def reserve(self, state: State) -> str:
        """Have the memory for the copies of :meth:`start` in advance, in the background.

        Worth it once, after the first step, when the optimizer has its state: without it the first
        save stalls for several times as long as the others.

        Returns:
            Why there is no memory for copies, in words; empty where there is.
        """
        self._check_ours()
        if self._flights.current() is None:
            held = self._accord.hold(state)
            self._copies.leave(self._committer.memory_to_come_bytes(state_bytes(held)))
            self._copies.reserve(held)
        return self._copies.refused

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

        While one is under way (on any rank) another is not begun but told as skipped: a disk that
        is slower than the saves come must not hold the training up.

        Returns:
            How long that took, in seconds: the stall of the training. 0.0 when none was begun.

        Raises:
            UnsavableState: the state holds what cannot be saved.
        """
        self._check_ours()
        begin_s = time.monotonic()
        call = self._accord.call(step)
        order = SaveRequest(step, kind, epoch, {**self._meta(), **meta}, topic=call.topic)
        try:
            held = self._begin(call, state)
        except SaveFailed as error:
            self._refused.append(error)
            self._committer.tell(SaveEventKind.FAILED, order, reason=str(error))
            return 0.0
        if isinstance(held, str):
            self._committer.tell(SaveEventKind.SKIPPED, order, reason=held)
            return 0.0
        order = replace(order, state=self._new_state())
        self._committer.tell(SaveEventKind.STARTED, order)
        staged = self._stage(held, order)
        if staged is held:
            self._launch(held, replace(order, state_bytes=state_bytes(held))).see_through()
        else:
            self._launch(staged, replace(order, state_bytes=self._copies.state_bytes))
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
        """Save and return when it is committed on the durable tier, through the fast one if there
        is one. One that is under way is waited for first.

        Args:
            again: False where any checkpoint of this step will do; the end of an epoch (kind
                "epoch") and other kinds do not stand in for each other.

        Raises:
            UnsavableState: the state holds what cannot be saved.
            SaveFailed: it could not be written; what was committed before is whole.
        """
        self._check_ours()
        begin_s = time.monotonic()
        call = self._accord.call(step)
        try:
            held = call.hold(state)
            size, number, about = state_bytes(held), self._new_state(), {**self._meta(), **meta}
            order = SaveRequest(step, kind, epoch, about, size, call.topic, number, again)
        except BaseException as error:
            call.decline(error)
            raise
        self._flights.wait()
        self._committer.tell(SaveEventKind.STARTED, order)
        flight = self._launch(held, order)
        flight.see_through()
        if flight.failure is not None:
            self._flights.forget(flight)
            raise as_checkpoint_error(flight.failure, step)
        standing = self._committer.standing(order)
        return Saved(
            step=step,
            tier=standing.tier,
            checkpoint=standing.checkpoint,
            steps_at_risk=standing.steps_at_risk,
            reason=f"step {step} is committed",
            took_s=time.monotonic() - begin_s,
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
        """Save for a stop: whatever can still be committed in time (see ``deadline.choose``).

        Returns when the step is committed on the durable tier, when that has failed, and at the
        deadline at the latest, by ``time.monotonic()``. Copying the state and a save on the fast
        tier are not interrupted, and are not begun unless they should fit. A save that fails costs
        no exception here but a word in ``Saved.reason``: the rest of the grace is the caller's.

        Args:
            unchanged: the state is certainly that of the newest save, or of what the run continues
                from: it is not saved again. The same on all ranks.

        Raises:
            UnsavableState: the state holds what cannot be saved. A save in flight was waited for.
        """
        self._check_ours()
        call = self._accord.call(step)
        try:
            held = call.hold(state() if callable(state) else state)
            number = self._state if unchanged else self._new_state()
            size, about = state_bytes(held), {**self._meta(), **meta}
            order = SaveRequest(step, kind, epoch, about, size, call.topic, number)
        except BaseException as error:
            self._flights.wait(deadline_mono_s - time.monotonic())
            call.situation(None, problem=error)
            raise
        stop = DeadlineSave(
            self._committer,
            self._flights,
            stage=self._stage,
            call=call,
            order=order,
            deadline_mono_s=deadline_mono_s,
        )
        try:
            choice = stop.choose()
        except UnsavableState:
            self._flights.wait(deadline_mono_s - time.monotonic())
            raise
        except SaveFailed as error:
            self._committer.tell(SaveEventKind.FAILED, order, reason=str(error))
            return stop.failed(error)
        self._committer.tell(SaveEventKind.STARTED, order, reason=choice.reason)
        return stop.carry_out(choice, held)

    def give_up(self) -> None:
        """Abandon what is under way: no save waits any longer for ranks that will not come."""
        if self._ours:
            self._flights.give_up()

    def poll(self) -> None:
        """Report what failed in the background since the last call, each failure once.

        Warnings:
            RuntimeWarning: a save failed and ``on_save_error`` is "warn"; or something beside the
                point did, such as the removal of an old checkpoint.

        Raises:
            SaveFailed: a save failed and ``on_save_error`` is "fail".
        """
        if not self._ours:
            return
        refused, self._refused = self._refused, []
        report(
            refused + self._flights.failures(),
            problems=self._committer.take_problems(),
            on_save_error=self._on_save_error,
        )

    def wait(self, *, timeout_s: float | None = None) -> bool:
        """Whether no save is under way any more, after waiting so long at the most."""
        return not self._ours or self._flights.wait(timeout_s)

    def close(self) -> None:
        """Wait for the save under way, and report as :meth:`poll` does."""
        if not self._ours:
            return
        self._copies.join()
        self._flights.wait()
        self.poll()

    def estimate(self) -> Estimate:
        """How long a save of a state of the last one's size is expected to take, per tier."""
        return self._committer.estimate()

    @property
    def durable_step(self) -> int | None:
        """The newest step that is committed on the durable tier, by this life or as the one that it
        continues from; a save that was begun counts when it is committed."""
        return self._committer.durable_step()

    @property
    def is_durable(self) -> bool:
        """Whether the state that was handed over last is committed on the durable tier."""
        return self._committer.is_durable(self._state)

    def continues_from(self, checkpoint: Checkpoint) -> None:
        """Say what the state was loaded from: until it changes there is nothing to save."""
        self._committer.continues_from(checkpoint)

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
        """The number of a state that is handed over now."""
        self._state += 1
        return self._state

    def _begin(self, call: Call, state: State) -> State | WritePlan | str:
        """What is to be saved now; in words why not, while a save is under way."""
        under_way = self._flights.current()
        held, problem = call.try_hold(state)
        why = call.busy(None if under_way is None else under_way.step, problem=problem)
        return held if why is None else why

    def _stage(self, held: State | WritePlan, order: SaveRequest) -> State | WritePlan:
        """A copy; ``held`` itself where there is no memory for one."""
        try:
            copied = self._copies.copy(held, being_read=self._flights.current() is not None)
        except BaseException as error:
            self._accord.decline(order, error)
            raise
        if copied is None:
            self._committer.tell(SaveEventKind.NOT_COPIED, order, reason=self._copies.refused)
            return held
        staged, seconds = copied
        order = replace(order, state_bytes=self._copies.state_bytes)
        self._committer.tell(SaveEventKind.STAGED, order, seconds=seconds)
        return staged

    def _launch(self, state: State | WritePlan, order: SaveRequest) -> AsyncSave:
        estimate = self._committer.estimate(order.state_bytes)
        return self._flights.launch(
            lambda cancel: self._committer.to_all(state, order, cancel=cancel),
            step=order.step,
            state=order.state,
            expected_s=estimate.durable.seconds
            + (0.0 if estimate.fast is None else estimate.fast.seconds),
        )
