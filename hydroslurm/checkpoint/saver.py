"""Saves the state of a run: beside the training, at once, or before a deadline."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal

from hydroslurm.checkpoint.committer import Committer, Order
from hydroslurm.checkpoint.estimate import Estimate
from hydroslurm.checkpoint.flight import Flight, Flights
from hydroslurm.checkpoint.outcome import Saved, SaveEvent, SaveEventKind
from hydroslurm.checkpoint.staging import Staging, state_bytes
from hydroslurm.checkpoint.stop import Stop
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.errors import CheckpointError, SaveAbandoned, SaveFailed, UsageError

_NO_META: Mapping[str, Any] = {}


class Saver:
    """The saves of one rank. For the thread that trains; a forked child has no use of it.

    One save is under way at a time. A save in the background writes a copy, so that the state is
    the caller's own again whenever a method has returned.
    """

    def __init__(
        self,
        durable: CheckpointStore,
        *,
        fast: CheckpointStore | None = None,
        keep: int = 2,
        keep_stop: int = 2,
        on_save_error: Literal["warn", "fail"] = "warn",
        exempt: Callable[[], AbstractContextManager[None]] = nullcontext,
        tell: Callable[[SaveEvent], None] | None = None,
    ) -> None:
        """Reads the manifests of earlier lives, to know how long a save takes here.

        Args:
            durable: where checkpoints are kept.
            fast: a quicker place, written first; what it promises is in ``Tier.promise``.
            keep: how many checkpoints stay on the durable tier, those of stops not counted.
            keep_stop: how many of stops.
            on_save_error: what :meth:`poll` does about a save that failed in the background.
            exempt: makes the context in which no pause holds a thread.
            tell: gets every event, from whatever thread.
        """
        if on_save_error not in ("warn", "fail"):
            raise UsageError(f'on_save_error is {on_save_error!r}; it must be "warn" or "fail"')
        if keep < 1 or keep_stop < 0:
            raise UsageError(
                f"keep={keep}, keep_stop={keep_stop}: wanted keep >= 1, keep_stop >= 0"
            )
        self._committer = Committer(durable, fast=fast, keep=keep, keep_stop=keep_stop, tell=tell)
        self._on_save_error = on_save_error
        self._exempt = exempt
        self._owner_pid = os.getpid()
        self._staging = Staging()
        self._reserving: threading.Thread | None = None
        self._flights = Flights(exempt=exempt, after=self._committer.prune)

    def reserve(self, state: State) -> None:
        """Have the memory for the copies of :meth:`start` in advance, in the background.

        Worth it once, after the first step, when the optimizer has its state: without it the first
        save stalls for several times as long as the others.
        """
        self._check_ours()
        if self._flights.current() is not None or self._reserving is not None:
            return

        def reserve() -> None:
            with self._exempt():
                self._staging.reserve(state)

        self._reserving = threading.Thread(target=reserve, name="hydroslurm-reserve", daemon=False)
        self._reserving.start()

    def start(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str = "periodic",
        meta: Mapping[str, Any] = _NO_META,
    ) -> float:
        """Copy the state and save the copy in the background.

        While one is under way another is not begun but told as skipped: a disk that is slower than
        the saves come must not hold the training up.

        Returns:
            How long that took, in seconds: the stall of the training.

        Raises:
            UnsavableState: the state holds what cannot be saved.
        """
        self._check_ours()
        begin_s = time.monotonic()
        order = Order(step=step, kind=kind, epoch=epoch, meta=dict(meta))
        under_way = self._flights.current()
        if under_way is not None:
            reason = f"the save of step {under_way.step} is still under way"
            self._committer.tell(SaveEventKind.SKIPPED, order, reason=reason)
            return 0.0
        self._committer.tell(SaveEventKind.STARTED, order)
        staged = self._stage(state, order)
        self._launch(staged, replace(order, state_bytes=self._staging.copied_bytes))
        return time.monotonic() - begin_s

    def save(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str = "manual",
        meta: Mapping[str, Any] = _NO_META,
    ) -> Saved:
        """Save and return when it is committed on the durable tier, through the fast one if there
        is one. One that is under way is waited for first.

        Raises:
            UnsavableState: the state holds what cannot be saved.
            SaveFailed: it could not be written; what was committed before is whole.
        """
        self._check_ours()
        begin_s = time.monotonic()
        order = Order(step, kind, epoch, dict(meta), state_bytes(state))
        self._flights.wait()
        self._committer.tell(SaveEventKind.STARTED, order)
        flight = self._launch(state, order)
        try:
            flight.join()
        except BaseException:
            # raised by a signal handler: the state is not the caller's own before the thread ends
            flight.give_up()
            flight.join()
            raise
        if flight.failure is not None:
            self._flights.forget(flight)
            raise _as_checkpoint_error(flight.failure, step)
        standing = self._committer.standing(step)
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
    ) -> Saved:
        """Save for a stop: whatever can still be committed in time (see ``deadline.choose``).

        Returns when the step is committed on the durable tier, when that has failed, and at the
        deadline at the latest, by ``time.monotonic()``. Copying the state and a save on the fast
        tier are not interrupted, and are not begun unless they should fit. A save that fails costs
        no exception here but a word in ``Saved.reason``: the rest of the grace is the caller's.

        Raises:
            UnsavableState: the state holds what cannot be saved. A save in flight was waited for.
        """
        self._check_ours()
        try:
            held = state() if callable(state) else state
            order = Order(step, kind, epoch, dict(meta), state_bytes(held))
        except BaseException:
            self._flights.wait(deadline_mono_s - time.monotonic())
            raise
        stop = Stop(
            self._committer,
            self._flights,
            stage=self._stage,
            order=order,
            deadline_mono_s=deadline_mono_s,
        )
        choice = stop.choose()
        self._committer.tell(SaveEventKind.STARTED, order, reason=choice.reason)
        return stop.carry_out(choice, held)

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
        failures = [one for one in self._flights.failures() if not isinstance(one, SaveAbandoned)]
        for problem in self._committer.take_problems():
            _warn(problem)
        if not failures:
            return
        message = (
            f"a save in the background failed: {'; '.join(str(one) for one in failures)}. "
            "What was committed before is whole"
        )
        if self._on_save_error == "fail":
            raise SaveFailed(message) from failures[0]
        _warn(f"{message}, the training goes on, and the next save is tried as usual")

    def wait(self, *, timeout_s: float | None = None) -> bool:
        """Whether no save is under way any more, after waiting so long at the most."""
        return not self._ours or self._flights.wait(timeout_s)

    def close(self) -> None:
        """Wait for the save under way, and report as :meth:`poll` does."""
        if not self._ours:
            return
        if self._reserving is not None:
            self._reserving.join()
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

    def continues_from(self, checkpoint: Checkpoint) -> None:
        """Say from which durable checkpoint the state was loaded: a stop before the next step has
        nothing to save then."""
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

    def _stage(self, state: State, order: Order) -> State:
        if self._reserving is not None:
            self._reserving.join()
        if self._flights.current() is not None:
            self._staging = Staging()  # the old one's memory is being read
        begin_s = time.monotonic()
        staged = self._staging.copy(state)
        order = replace(order, state_bytes=self._staging.copied_bytes)
        self._committer.tell(SaveEventKind.STAGED, order, seconds=time.monotonic() - begin_s)
        return staged

    def _launch(self, state: State, order: Order) -> Flight:
        estimate = self._committer.estimate(order.state_bytes)
        return self._flights.launch(
            lambda cancel: self._committer.to_all(state, order, cancel=cancel),
            step=order.step,
            expected_s=estimate.durable.seconds
            + (0.0 if estimate.fast is None else estimate.fast.seconds),
        )


def _as_checkpoint_error(failure: BaseException, step: int) -> BaseException:
    """The failure itself when it says what is wrong with the checkpoint."""
    if isinstance(failure, CheckpointError):
        return failure
    error = SaveFailed(f"step {step} was not saved: {type(failure).__name__}: {failure}")
    error.__cause__ = failure
    return error


def _warn(text: str) -> None:
    warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=3)
