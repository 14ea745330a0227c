"""One vacate of all ranks, as one of them does it.

    ready -> lock -> checkpoint -> (paused) -> restore -> unlock
         all       all         all                 all

Behind each arrow the ranks agree, and no rank goes on before all have got there: a process whose
peer is locked may hang in its own checkpoint, so all are locked first, and none is unlocked before
all are restored. Up to the first checkpoint everything can be undone. A failure then is unlocked
everywhere, and the pause is a plain one. Later a failure of one rank makes all give back what they
have moved. What cannot be given back is reported as lost, and never papered over: its rank cannot
train on, and the run has its last checkpoint.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from hydroslurm.errors import RanksError, VacateError
from hydroslurm.vacate.policy import DeviceState

if TYPE_CHECKING:
    from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint

_RUNNING = DeviceState.RUNNING
UNLOCK_TRIES = 3


Agree: TypeAlias = "Callable[..., Mapping[int, Any]]"
"""As :meth:`hydroslurm.coordination.client.CoordinatorClient.agree`."""


def alone(topic: str, value: Any, **_: Any) -> Mapping[int, Any]:  # noqa: ARG001
    """The agreement of a rank that has no others."""
    return {0: value}


@dataclass(frozen=True)
class Limits:
    """How long to wait for what, seconds.

    Attributes:
        floor_bytes_per_s: what moves memory slower than this hangs.
        retry_s: between two tries to restore onto a device that is full.
    """

    lock_s: float = 10.0
    state_s: float = 10.0
    move_s: float = 60.0
    floor_bytes_per_s: float = 0.25e9
    agree_s: float = 30.0
    retry_s: float = 2.0

    def moving_s(self, size_bytes: int) -> float:
        return self.move_s + size_bytes / self.floor_bytes_per_s


@dataclass(frozen=True)
class Outcome:
    """What became of one half of a vacate.

    Attributes:
        done: vacated; or, of a return, restored.
        moved_bytes: how much device memory that has freed or filled.
        took_s: of this rank's own part, without waiting for the others.
        reason: why not done; also what is odd about one that is.
        lost: the device memory of this rank is gone for good.
    """

    done: bool
    moved_bytes: int = 0
    took_s: float = 0.0
    reason: str = ""
    lost: bool = False


class VacateRound:
    """One rank's part in one vacate. For one thread, which is never held at the gate.

    Args:
        device: of this rank; not called where this rank refuses.
        topic: of the agreements; the same on all ranks, and used once.
        cancel: set when the pause is over, so that what can be undone is not begun.
    """

    def __init__(
        self,
        device: CudaCheckpoint,
        *,
        topic: str,
        agree: Agree = alone,
        limits: Limits | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self._device = device
        self._topic = topic
        self._agree_with = agree
        self._limits = limits or Limits()
        self._cancel = cancel or threading.Event()
        self._bytes = 0

    # --- away

    def vacate(self, refusal: str = "") -> Outcome:
        """Take part, with a refusal where this rank cannot vacate: then no rank does."""
        if reason := self._agree("ready", refusal, cancel=self._cancel):
            return Outcome(False, reason=reason)
        began_s = time.monotonic()
        mistake = self._try(self._device.lock, self._limits.lock_s)
        if not mistake and self._cancel.is_set():
            mistake = "the pause ended before anything was moved"
        lock_s = time.monotonic() - began_s
        if reason := self._agree("locked", mistake):
            return self._undo(reason)
        return self._checkpoint(lock_s)

    def _checkpoint(self, lock_s: float) -> Outcome:
        """The point of no return."""
        began_s = time.monotonic()
        limit_s = self._limits.moving_s(self._device.device_bytes())
        mistake = ""
        try:
            self._bytes = self._device.checkpoint(limit_s)
        except VacateError as error:
            mistake = str(error)
        took_s = lock_s + time.monotonic() - began_s
        try:
            told = self._ask("checkpointed", mistake)
        except RanksError as error:
            if mistake:
                return self._undo(mistake)
            # this rank's memory is safe on the host, and each rank can give back its own
            return Outcome(True, self._bytes, took_s, f"the others have not answered: {error}")
        if reason := _of_all(told):
            return self._undo(reason)
        return Outcome(True, self._bytes, took_s)

    def _undo(self, reason: str) -> Outcome:
        """Bring this rank back to RUNNING, from wherever it is."""
        state = self._device.state(self._limits.state_s)
        if state is DeviceState.CHECKPOINTED:
            back = self._move_back(waits=None)
            if not back.done:
                return replace(back, reason=f"{reason}; {back.reason}")
            state = DeviceState.LOCKED
        if state is DeviceState.LOCKED:
            mistake, state = self._unlock()
            reason = f"{reason}; {mistake}" if mistake else reason
        if state is DeviceState.RUNNING:
            return Outcome(False, reason=reason)
        return Outcome(False, reason=f"{reason}; the device is {state.value}", lost=True)

    # --- and back

    def restore(self, waits: Callable[[str], None]) -> Outcome:
        """Give it all back; tries for as long as the device is full.

        Args:
            waits: told why, at the first failure that may pass.
        """
        back = self._move_back(waits=waits)
        odd = ""
        try:
            odd = _of_all(self._ask("restored", "" if back.done else back.reason))
        except RanksError as error:
            odd = f"the others have not answered: {error}"
        if not back.done:
            return back
        mistake, state = self._unlock()
        if state is not _RUNNING:
            return Outcome(False, reason=f"{mistake}; the device is {state.value}", lost=True)
        return replace(back, reason="; ".join(filter(None, (odd, mistake))))

    def _unlock(self) -> tuple[str, DeviceState]:
        """The last mistake, and the state it has left. Tried again, because everything is in place
        by now and only a call is between this rank and its training."""
        mistake, state = "", _RUNNING
        for _ in range(UNLOCK_TRIES):
            latest = self._try(self._device.unlock, self._limits.lock_s)
            mistake = latest or mistake
            state = self._device.state(self._limits.state_s) if latest else _RUNNING
            if state is not DeviceState.LOCKED:
                break
        return mistake, state

    def _move_back(self, *, waits: Callable[[str], None] | None) -> Outcome:
        told = False
        while True:
            began_s = time.monotonic()
            mistake = self._try(self._device.restore, self._limits.moving_s(self._bytes))
            took_s = time.monotonic() - began_s
            if not mistake:
                return Outcome(True, self._bytes, took_s)
            state = self._device.state(self._limits.state_s)
            if state in (DeviceState.LOCKED, DeviceState.RUNNING):  # it came late, and well
                return Outcome(True, self._bytes, took_s, mistake)
            if state is not DeviceState.CHECKPOINTED:
                reason = f"{mistake}; the device is {state.value}"
                return Outcome(False, reason=reason, lost=True)
            # somebody else has the memory; a device that is full is no reason to end a training
            if waits is not None and not told:
                waits(mistake)
                told = True
            time.sleep(self._limits.retry_s)

    # --- the ranks

    def _agree(self, phase: str, mistake: str, *, cancel: threading.Event | None = None) -> str:
        """Why not all ranks may go on; empty if they may."""
        try:
            return _of_all(self._ask(phase, mistake, cancel=cancel))
        except RanksError as error:
            return mistake or str(error)

    def _ask(
        self, phase: str, mistake: str, *, cancel: threading.Event | None = None
    ) -> Mapping[int, Any]:
        limit_s = self._limits.agree_s
        if phase in ("checkpointed", "restored"):  # of a rank that has more to move than this one
            limit_s += self._limits.moving_s(max(self._bytes, self._device.device_bytes()))
        topic = f"{self._topic}/{phase}"
        return self._agree_with(topic, mistake[:1000], timeout_s=limit_s, cancel=cancel)

    def _try(self, call: Callable[[float], object], timeout_s: float) -> str:
        try:
            call(timeout_s)
        except VacateError as error:
            return str(error)
        return ""


def _of_all(told: Mapping[int, Any]) -> str:
    """The ranks' reasons, in one sentence; empty if none has one."""
    reasons = [f"rank {rank}: {reason}" for rank, reason in sorted(told.items()) if reason]
    if len(told) == 1:
        return "".join(str(reason) for reason in told.values())
    return "; ".join(reasons[:4]) + (f"; {len(reasons) - 4} more" if len(reasons) > 4 else "")
