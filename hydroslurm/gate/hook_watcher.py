"""The watcher thread of the module-hook gate, which closes and opens it; the queue of events."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.events import EventKind
from hydroslurm.gate.hook_signals import NUDGE, SignalPipe, runs
from hydroslurm.gate.hook_threads import Holds
from hydroslurm.gate.marks import NvtxMarks
from hydroslurm.gate.protocol import Action, Cause, GateEvent, GateState, SignalRule

_MAX_EVENTS = 4096
_SAMPLE_S = 0.005
"""How often to check whether the threads that are not held have gone quiet."""
_TERMINAL_WAIT_S = 1.0
"""Ctrl-Z stops the process after this time at the latest, parked or not: the shell is waiting."""


@dataclass(frozen=True)
class _Request:
    action: Action
    causes: Cause
    mono_ns: int
    signo: int = 0


class EventQueue:
    """What the gate saw. Written by any thread, a Python signal handler included; read by one.

    Attributes:
        causes: why the gate is closed now; goes into every event.
    """

    def __init__(self) -> None:
        self.causes = Cause(0)
        self._events: queue.SimpleQueue[GateEvent | None] = queue.SimpleQueue()
        self._dropped = 0

    def emit(self, kind: EventKind, *, mono_ns: int = 0, **fields: Any) -> None:
        """Add one event; a full queue only counts it.

        Args:
            mono_ns: when it happened; default: now.
            fields: the other fields of :class:`GateEvent`.
        """
        if self._events.qsize() >= _MAX_EVENTS:
            self._dropped += 1
            return
        event = GateEvent(
            kind=kind,
            mono_ns=mono_ns or time.monotonic_ns(),
            epoch_ns=time.time_ns(),
            causes=self.causes,
            **fields,
        )
        self._events.put(event)

    def reset_after_fork(self) -> None:
        """In a forked child: empty, with a lock that no thread of the parent holds."""
        self._events = queue.SimpleQueue()

    def wake(self) -> None:
        """Make a blocked :meth:`wait` return."""
        self._events.put(None)

    def wait(self, timeout_s: float | None) -> list[GateEvent]:
        """The events that are there, oldest first; waits for the first one, or a :meth:`wake`."""
        found: list[GateEvent] = []
        with contextlib.suppress(queue.Empty):
            event = self._events.get(block=timeout_s != 0, timeout=timeout_s)
            while True:
                if event is not None:
                    found.append(event)
                event = self._events.get_nowait()
        if self._dropped:
            count, self._dropped = self._dropped, 0
            self.emit(EventKind.EVENTS_DROPPED, count=count)
            found += self.wait(0)
        return found


class Watcher:
    """Decides whether the gate is closed, in a thread of its own.

    Attributes:
        state, causes: of the gate at this moment.
        closes: how often it was closed.
        closed_mono_ns: since when it is closed; 0 while it is open.
    """

    def __init__(self, *, holds: Holds, events: EventQueue, marks: NvtxMarks) -> None:
        self.state = GateState.RUNNING
        self.causes = Cause(0)
        self.closes = 0
        self.closed_mono_ns = 0
        self._holds = holds
        self._events = events
        self._marks = marks
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._requested_ns = 0
        self._stop_wanted = False
        self._stopping = False
        self._ending = False
        self._thread: threading.Thread | None = None

    def start(self, pipe: SignalPipe, rules: Mapping[int, SignalRule]) -> None:
        """Watch the pipe, through which the signals of these rules arrive."""
        self._ending, self._stopping, self.state = False, False, GateState.RUNNING
        self._thread = threading.Thread(
            target=self._watch, args=(pipe, rules), name="hydroslurm-gate", daemon=True
        )
        self._thread.start()

    def stop(self, pipe: SignalPipe) -> None:
        """End the thread and open the gate."""
        assert self._thread is not None
        self._ending = True
        pipe.nudge()
        self._thread.join()
        self._set_causes(Cause(0))
        self._open(time.monotonic_ns())
        self.state = GateState.RUNNING

    def add_request(self, action: Action, causes: Cause) -> None:
        """Ask from inside the process; taken once the pipe is nudged."""
        self._requests.put(_Request(action, causes, time.monotonic_ns()))

    def reset_after_fork(self) -> None:
        """In a forked child: there is no thread, and nothing was asked for."""
        self._requests = queue.SimpleQueue()
        self._set_causes(Cause(0))
        self.state, self.closed_mono_ns = GateState.RUNNING, 0

    # --- in the thread

    def _watch(self, pipe: SignalPipe, rules: Mapping[int, SignalRule]) -> None:
        # signals must interrupt the main thread, the only one that may call chained handlers
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._ending:
            parking = self.state is GateState.PARKING
            for byte, count in runs(pipe.read(_SAMPLE_S if parking else None)):
                if byte == NUDGE:
                    self._take_requests()
                elif byte in rules:
                    self._take_signal(rules[byte], count)
            if self.state is GateState.PARKING and self._holds.check():
                self._park()
            if self._stop_wanted:
                self._stop_for_terminal()

    def _take_requests(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                request = self._requests.get_nowait()
                self._events.emit(
                    EventKind.SIGNAL_RECEIVED,
                    mono_ns=request.mono_ns,
                    count=1,
                    text=request.action.name.lower(),
                )
                self._marks.requested(request.action, 0, request.mono_ns)
                self._apply(request)

    def _take_signal(self, rule: SignalRule, count: int) -> None:
        now_ns = time.monotonic_ns()
        self._events.emit(EventKind.SIGNAL_RECEIVED, mono_ns=now_ns, signo=rule.signo, count=count)
        causes = rule.causes
        if rule.signo == signal.SIGTSTP and causes == Cause.SLURM and _is_foreground():
            causes = Cause.TERMINAL
        self._marks.requested(rule.action, rule.signo, now_ns)
        self._apply(_Request(rule.action, causes, now_ns, rule.signo))

    def _apply(self, request: _Request) -> None:
        if self.state is GateState.STOPPING:
            return
        if request.action is Action.STOP:
            self._stopping = True
            self._set_causes(self.causes & Cause.VACATED)
            self._events.emit(
                EventKind.STOP_REQUESTED, signo=request.signo, value_ns=request.mono_ns
            )
            self._stop_unless_vacated(request.mono_ns)
            return
        if self._stopping:
            self._set_causes(self.causes & ~request.causes)
            self._stop_unless_vacated(request.mono_ns)
            return
        before = self.causes
        if request.action is Action.PAUSE:
            self._set_causes(before | request.causes)
            self._stop_wanted = self._stop_wanted or Cause.TERMINAL in request.causes
        else:
            self._set_causes(before & ~request.causes)
        if self.causes and not self._holds.closed:
            self._close(request.mono_ns)
        elif not self.causes and self._holds.closed:
            self._open(request.mono_ns)
        else:  # also when nothing changed: whoever asked waits for an answer
            self._events.emit(EventKind.CAUSES_CHANGED)

    def _stop_unless_vacated(self, requested_ns: int) -> None:
        if not self.causes:
            self._open(requested_ns)
            self.state = GateState.STOPPING

    def _set_causes(self, causes: Cause) -> None:
        self.causes = self._events.causes = causes

    def _close(self, requested_ns: int) -> None:
        self.closes += 1
        self._requested_ns, self.closed_mono_ns = requested_ns, time.monotonic_ns()
        self.state = GateState.PARKING
        # said before it is done, or a thread could be held at a gate that is not known to be closed
        self._events.emit(EventKind.GATE_CLOSED, value_ns=requested_ns)
        self._marks.gate_closed(self.closes, requested_ns)
        self._holds.close()

    def _park(self) -> None:
        self.state, self._holds.parked = GateState.PARKED, True
        self._marks.at_rest(time.monotonic_ns())
        self._events.emit(
            EventKind.PARKED,
            value_ns=self._requested_ns,
            held=self._holds.held_count,
            quiet=self._holds.quiet,
        )

    def _open(self, requested_ns: int) -> None:
        if not self._holds.closed:
            return
        self.closed_mono_ns, self.state, self._stop_wanted = 0, GateState.RUNNING, False
        self._events.emit(
            EventKind.RESUMED,
            value_ns=requested_ns,
            passed=self._holds.passed_exempt,
            held=self._holds.held_count,
            quiet=self._holds.quiet,
        )
        self._marks.gate_opened(requested_ns, held=self._holds.held_count)
        self._holds.open()

    def _stop_for_terminal(self) -> None:
        """Ctrl-Z: really stop, once parked. Whoever continues us has ended that pause."""
        waited_s = (time.monotonic_ns() - self.closed_mono_ns) / 1e9
        if self.state is GateState.PARKING and waited_s < _TERMINAL_WAIT_S:
            return
        self._stop_wanted = False
        if _has_job_control():
            self._events.emit(EventKind.TERMINAL_STOP)
            # to this very thread: sent to the process, it might stop it only after we have gone on
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            self._events.emit(EventKind.TERMINAL_STOP_IGNORED)
        self._apply(_Request(Action.RESUME, Cause.TERMINAL, time.monotonic_ns()))


def _is_foreground() -> bool:
    """Whether this process is in the foreground of its terminal: where Ctrl-Z would come from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _has_job_control() -> bool:
    """Whether somebody could continue us after a stop: a parent in our session, outside our group.

    Without one the process group is orphaned, and the kernel would ignore a Ctrl-Z too. Only our
    own ancestors are looked at: a shell that started the group is one of them.
    """
    group, session = os.getpgrp(), os.getsid(0)
    pid = os.getppid()
    try:
        while pid > 1 and os.getsid(pid) == session:
            if os.getpgid(pid) != group:
                return True
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return False
    return False
