"""Vacating during a pause: when device memory is moved to the host, and when it is moved back.

Each vacated pause has a thread. It adds the cause ``vacated``, so that neither a resume nor a stop
opens the gate before the memory is back. The thread is never held at the gate, takes none of the
training's locks and imports nothing, because a parked thread may hold the lock.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydroslurm.coordination.world import World
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.events import EventKind
from hydroslurm.core.memory import room
from hydroslurm.core.threads import say, thread
from hydroslurm.errors import HydroslurmError, InstallError, UsageError
from hydroslurm.gate.marks import Range
from hydroslurm.gate.protocol import Action, Cause, GateState
from hydroslurm.runtime import device
from hydroslurm.vacate.policy import (
    DEFAULT_GRACE_S,
    VacatePolicy,
    grace_from,
    why_no_memory,
    why_no_time,
    why_not_here,
)
from hydroslurm.vacate.request import read_request
from hydroslurm.vacate.round import Agree, Limits, Outcome, VacateRound, alone

if TYPE_CHECKING:
    from hydroslurm.coordination.client import CoordinatorClient
    from hydroslurm.gate import Gate
    from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint

_POLL_S = 0.5
_LOOK_S = 2.0
"""How often to look whether the script has come to use a device."""
_LATCH_S = 5.0
_TOLD_S = 1.0
"""Until the controller has written down that our cause is there, or gone."""

Emit = Callable[[EventKind, Mapping[str, object]], None]


class Vacating:
    """Of one installation.

    Attributes:
        policy: which pauses vacate.
        grace_s: between Slurm's SIGTSTP and its SIGSTOP.
        log: where this rank's events go, beside which a request is looked for.
        is_at_work: memory is away, or on its way there or back.
        open_device: finds the device at the first vacate; None: there is nothing to move.
    """

    def __init__(
        self,
        gate: Gate,
        environ: Mapping[str, str],
        *,
        emit: Emit,
        on_idle: Callable[[], None],
        log: Path | None,
    ) -> None:
        """
        Args:
            environ: which pauses vacate, and the grace.
            on_idle: called when a vacate is over, in its thread: another may be wanted by now.

        Raises:
            UsageError: a bad ``HYDROSLURM_VACATE`` or ``HYDROSLURM_SUSPEND_GRACE_S``.
        """
        self.policy = VacatePolicy.from_environ(environ)
        self.grace_s = DEFAULT_GRACE_S if (told := grace_from(environ)) is None else told
        if not why_not_here():  # loaded now: a parked thread may hold the lock of an import
            importlib.import_module("hydroslurm.vacate.cuda_checkpoint")
        self._environ = dict(environ)
        self.open_device: Callable[[], CudaCheckpoint | None] = open_device
        self.is_at_work = False
        self._gate = gate
        self._emit = emit
        self._on_idle = on_idle
        self.log = log
        self._ranks_here = World.from_environ(environ).local_world_size
        self._limits = Limits()
        self._device: CudaCheckpoint | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._holds = False
        self._cause_is_there = threading.Event()
        self._cause_is_gone = threading.Event()
        self._ended = threading.Event()
        self._began = (0, "", 0)

    # --- called by the controller

    def get_ready(self, job_id: int | None) -> None:
        """Where each pause vacates, the first must not wait for a helper to start, nor for
        slurmctld; returns at once."""
        if self.policy is VacatePolicy.ALWAYS:
            thread(self._get_ready, job_id, name="hydroslurm-vacate-ready").start()

    def _get_ready(self, job_id: int | None) -> None:
        if job_id is not None and grace_from(self._environ) is None:
            with contextlib.suppress(HydroslurmError, UsageError, OSError):
                self.grace_s = _grace_of_site(self._environ)
        while self._device is None and not self._ended.wait(_LOOK_S):
            if not self.is_at_work and (found := self.open_device()) is not None:
                found.refusal()  # starts the helper
                self._device = found

    def begin(
        self,
        pause: int,
        ranks: CoordinatorClient | None = None,
        topic: str = "",
        *,
        refusal: str = "",
    ) -> None:
        """All ranks are parked: vacate, if this pause is to; returns at once.

        Args:
            ranks: the others; None for a rank that is alone.
            topic: names this parking of theirs, the same for all of them.
            refusal: why nothing can be moved in this pause, empty if it can; recorded if the pause
                was to vacate.
        """
        if self.policy is VacatePolicy.NEVER or self.is_at_work:
            return
        asked = None if self.log is None else read_request(self.log)
        if asked is not None and (asked.pid, asked.pause) != (os.getpid(), pause):
            asked = None
        if asked is None and self.policy is not VacatePolicy.ALWAYS:
            return
        number = 0 if asked is None else asked.number
        if self._began == (pause, topic, number):
            return
        if asked is not None and asked.grace_s is not None:
            self.grace_s = float(asked.grace_s)
        self._began = (pause, topic, number)
        self._over.clear()
        self.is_at_work = True
        agree: Agree = alone if ranks is None else ranks.agree
        closing, topic = self._gate.status().closes, f"vacate/{topic}.{number}"
        self._thread = thread(
            self._run, pause, closing, topic, agree, refusal, name="hydroslurm-vacate"
        )
        self._thread.start()

    def on_causes(self, causes: Cause, *, stops: bool = False) -> None:
        """The gate's causes have changed, and that was written down: the last but ours has gone,
        or a stop has come."""
        (self._cause_is_there if Cause.VACATED in causes else self._cause_is_gone).set()
        if stops or not causes & ~Cause.VACATED:
            self._over.set()

    def end(self) -> None:
        """Give everything back, before the gate is stopped; waits for it."""
        self._over.set()
        self._ended.set()
        at_work = self._thread
        if at_work is not None and at_work is not threading.current_thread():
            at_work.join()
        if self._device is not None:
            self._device.close()
            self._device = None

    # --- the thread

    def _run(self, pause: int, closing: int, topic: str, agree: Agree, refusal: str) -> None:
        with self._gate.exempt():
            try:
                if late := self._hold_closed(closing):
                    # the others are told, or they would wait for this rank's answer; it does not
                    # wait for theirs, because the gate may be closed by our own cause alone
                    self._let_open()
                    self._over.set()
                self._vacate(pause, topic, agree, late or refusal)
            except Exception as error:  # a fault of ours must not leave the gate closed for good
                self._not_vacated({"pause": pause, "reason": _named(error)})
            finally:
                # in this order: the next thread's cause must not be taken back by this one
                self._let_open()
                self.is_at_work = False
                self._on_idle()  # a pause that has come meanwhile may vacate again

    def _hold_closed(self, closing: int) -> str:
        """Add our cause to those of the pause; returns why it does not hold, empty if it does."""
        self._cause_is_there.clear()
        self._gate.request(Action.PAUSE, Cause.VACATED)
        self._holds = True
        clock = AwakeClock()
        until_s = clock.now_s() + _LATCH_S
        while True:
            status = self._gate.status()
            if Cause.VACATED in status.causes:
                if status.closes != closing:  # it had opened; our own request closed it again
                    return "the pause ended before anything was moved"
                if status.state is GateState.PARKED:
                    return ""
            if clock.now_s() >= until_s:
                state = status.state.name.lower()
                return f"the gate did not hold the rank within {_LATCH_S:g} s: it is {state}"
            time.sleep(0.001)

    def _let_open(self) -> None:
        if not self._holds:
            return
        self._holds = False
        self._cause_is_gone.clear()  # here: until now our cause may not have been written down yet
        with contextlib.suppress(InstallError):  # this rank has left
            self._gate.request(Action.RESUME, Cause.VACATED)

    def _not_vacated(self, data: Mapping[str, object]) -> None:
        """Log this last: a reader may resume at once, and must not mistake the removal of our own
        cause for the answer."""
        self._let_open()
        self._cause_is_gone.wait(_TOLD_S)
        self._emit(EventKind.NOT_VACATED, data)

    def _vacate(self, pause: int, topic: str, agree: Agree, refusal: str) -> None:
        marks = self._gate.marks
        began_s = time.monotonic()
        mark = marks.begin(Range.VACATING, pause)
        refusal = refusal or self._refusal()
        one = VacateRound(
            self._device or _NO_DEVICE,
            topic=topic,
            agree=agree,
            limits=self._limits,
            cancel=self._over,
        )
        away = one.vacate(refusal)
        marks.end(mark)
        data = {"pause": pause, "vacate_s": time.monotonic() - began_s, **_told(away)}
        if not away.done:
            self._not_vacated(data)
            if away.lost:
                say(_lost_message(away))
            return
        # as in _not_vacated(): our cause must be in the log before a resume can follow
        self._cause_is_there.wait(_TOLD_S)
        self._emit(EventKind.VACATED, data)
        while not self._over.wait(_POLL_S) and self._is_paused():
            pass
        mark = marks.begin(Range.RESTORING, pause)
        began_s = time.monotonic()
        back = one.restore(lambda reason: self._wait_told(pause, reason))
        marks.end(mark)
        data = {"pause": pause, "restore_s": time.monotonic() - began_s, **_told(back)}
        self._emit(EventKind.RESTORED if back.done else EventKind.RESTORE_FAILED, data)
        if not back.done:
            say(_lost_message(back))
        elif back.reason:
            say(f"device memory is back, with something odd: {back.reason}")
        if back.done and self._is_paused():
            self._began = (0, "", 0)

    def _is_paused(self) -> bool:
        return bool(self._gate.status().causes & ~Cause.VACATED)

    def _wait_told(self, pause: int, reason: str) -> None:
        self._emit(EventKind.RESTORE_WAITS, {"pause": pause, "reason": reason})
        say(
            f"device memory cannot be given back yet, because somebody else has it ({reason}); "
            "the rank stays parked and tries again"
        )

    def _refusal(self) -> str:
        """Why this rank cannot vacate; empty if it can."""
        if self._device is None:
            self._device = self.open_device()
        found = self._device
        if found is None:
            why = why_not_here() or "this process has not used a device"
            return f"there is no device memory to give back: {why}"
        status = self._gate.status()
        if status.capturing:
            return "a CUDA graph is being captured"
        drained = device.drain(exempt=self._gate.exempt)
        if drained is not None and not drained.drained:
            return f"the device is not idle: {drained.reason}"
        if reason := found.refusal():
            return reason
        size_bytes = found.device_bytes()
        if reason := why_no_memory(size_bytes, room(ranks_here=self._ranks_here)):
            return reason
        if Cause.SLURM not in status.causes:
            return ""
        passed_s = (time.monotonic_ns() - status.closed_mono_ns) / 1e9
        return why_no_time(size_bytes, found.bytes_per_s, grace_s=self.grace_s, passed_s=passed_s)


def _grace_of_site(environ: Mapping[str, str]) -> float:
    from hydroslurm.slurm.client import open_client  # every start would pay for it

    return float(open_client(environ=environ).config().suspend_grace_time_s)


def open_device() -> CudaCheckpoint | None:
    """The memory of this process on its devices; None where it has none, or the node cannot."""
    devices = device.used_devices()
    if not devices or why_not_here():
        return None
    from hydroslurm.vacate.communicators import Communicators
    from hydroslurm.vacate.cuda_checkpoint import CudaCheckpoint

    return CudaCheckpoint(
        used_bytes=device.reserved_bytes, devices=len(devices), communicators=Communicators()
    )


_NO_DEVICE: Any = None
"""Stands for the device of a rank without one, whose refusal ends the round before any call."""


def _told(outcome: Outcome) -> dict[str, Any]:
    data: dict[str, Any] = {"moved_bytes": outcome.moved_bytes, "moved_s": outcome.took_s}
    if outcome.reason:
        data["reason"] = outcome.reason
    if outcome.lost:
        data["lost"] = True
    return data


def _lost_message(outcome: Outcome) -> str:
    return (
        f"the device memory of this rank is lost ({outcome.reason}). It cannot train on: its next "
        "operator on the device fails, or waits for ever. End it; the run resumes from its last "
        "checkpoint"
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
