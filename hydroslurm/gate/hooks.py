"""The module-hook gate: for machines without a compiler. Pure Python, the same rules as native.

    signal -> CPython's C handler -> pipe -> watcher thread: close or open
    request -> queue, pipe        ->
    training thread: waits at its next module boundary (ophooks.py, holds.py)

What it misses: everything that is not a module. Functional operators, the loss, the optimizer and
copies are not held; a backward is held only at the modules that it comes by; what torch.compile
made is one piece. And the hooks cost time while nothing is paused.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydroslurm.core.events import EventKind
from hydroslurm.errors import AlreadyInstalled, InstallError
from hydroslurm.gate.dispositions import Owner, owner_shown
from hydroslurm.gate.holds import Holds
from hydroslurm.gate.hook_events import EventQueue
from hydroslurm.gate.hook_signals import (
    NUDGE,
    SignalPipe,
    has_job_control,
    is_foreground,
    runs,
)
from hydroslurm.gate.marks import NvtxMarks
from hydroslurm.gate.ophooks import (
    BaseOpHook,
    ExecutionOpHook,
    register_ophooks_recursively,
)
from hydroslurm.gate.protocol import (
    Action,
    Cause,
    GateEvent,
    GateState,
    GateStatus,
    SignalOutcome,
    SignalRule,
    Trace,
)
from hydroslurm.gate.shown import in_main_thread

if TYPE_CHECKING:
    import torch

__all__ = ["BaseOpHook", "ExecutionOpHook", "HooksGate", "register_ophooks_recursively"]

_SAMPLE_S = 0.005
"""How often the watcher looks whether the threads that are not held have gone quiet."""
_TERMINAL_WAIT_S = 1.0
"""Ctrl-Z stops the process after this time at the latest, parked or not: the shell is waiting."""


@dataclass(frozen=True)
class _Request:
    action: Action
    causes: Cause
    mono_ns: int
    signo: int = 0


class HooksGate:
    """Holds training threads at module boundaries; for the methods see ``protocol.Gate``.

    :meth:`start` with signals, and the :meth:`stop` after it, belong to the main thread; the rest
    may be called from any.
    """

    def __init__(self, *, model: torch.nn.Module | None = None) -> None:
        """``model``: hook its leaf modules; default: every module of the process."""
        self.marks = NvtxMarks()
        self._events = EventQueue()
        self._holds = Holds(model=model, events=self._events, marks=self.marks, on_held=self._nudge)
        self._pipe: SignalPipe | None = None
        self._watcher: threading.Thread | None = None
        self._rules: dict[int, SignalRule] = {}
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._ending = False
        self._stop_wanted = False
        self._causes = Cause(0)
        self._state = GateState.RUNNING
        self._closes = 0
        self._closed_mono_ns = 0
        self._requested_ns = 0

    # --- the protocol -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return "hooks"

    @property
    def granularity(self) -> str:
        return (
            "module boundaries, forward and backward (not functional operators, loss, optimizer or "
            "copies; a backward between two modules runs on; compiled regions are one piece)"
        )

    def start(self, rules: Sequence[SignalRule]) -> dict[int, SignalOutcome]:
        """Install hooks and handlers, start the watcher; on failure leave nothing behind.

        Raises:
            AlreadyInstalled: this or another module-hook gate runs in this process.
            InstallError: signals were asked for off the main thread, or cannot be taken.
        """
        global _running
        with _start_lock:
            if _running is not None:
                raise AlreadyInstalled(
                    "a module-hook gate runs in this process already; stop() it first"
                )
            pipe = SignalPipe()
            with contextlib.ExitStack() as undo:
                undo.callback(pipe.close)
                outcomes = pipe.install(rules)
                undo.callback(pipe.restore)
                self._holds.add_hooks()
                undo.callback(self._holds.remove_hooks)
                self._pipe, self._rules = pipe, {rule.signo: rule for rule in rules}
                self._ending, self._state = False, GateState.RUNNING
                self._watcher = threading.Thread(
                    target=self._watch, args=(pipe,), name="hydroslurm-gate", daemon=True
                )
                self._watcher.start()
                undo.pop_all()
            _running = self
        return outcomes

    def stop(self) -> int:
        """Open, restore, remove the hooks; 0 also when not running.

        Raises:
            InstallError: not the main thread while handlers are installed; nothing was changed.
        """
        global _running
        with _start_lock:
            if _running is not self or self._pipe is None or self._watcher is None:
                return 0
            replaced = self._pipe.restore()
            self._ending = True
            self._pipe.nudge()
            self._watcher.join()
            self._set_causes(Cause(0))
            self._open(time.monotonic_ns())
            self._state = GateState.RUNNING
            self._holds.remove_hooks()
            pipe, self._pipe, self._watcher, _running = self._pipe, None, None, None
            pipe.close()
        return replaced

    def request(self, action: Action, causes: Cause) -> None:
        """Ask from inside the process; returns at once.

        Raises:
            InstallError: the gate does not run in this process.
        """
        if self._pipe is None:
            raise InstallError(
                f"the gate refuses {action.name}: it was not started in this process; start() it"
            )
        self._requests.put(_Request(action, causes, time.monotonic_ns()))
        self._nudge()

    @property
    def stops_at_collectives(self) -> bool:
        return False

    @property
    def hears_beside_others(self) -> bool:
        return True  # by the wakeup descriptor

    def let_through(self, n: int) -> None:
        """Raises:
        InstallError: always; a hook on a module does not see a collective.
        """
        raise InstallError(
            f"the module-hook gate cannot let {n} collectives through: it does not see them. Ranks "
            "that have to be parked at the same one need the native gate (install g++)"
        )

    def hold_here(self) -> None:
        """Nothing to do: nobody is ever let through."""
        self._started_pipe("hold here")

    def claim(self, action: Action) -> int:
        """As in the protocol; in the main thread only."""
        return self._started_pipe("take signals over").claim(self._rules_for(action))

    def unclaim(self, action: Action) -> None:
        """As in the protocol; in the main thread only."""
        self._started_pipe("give signals back").unclaim(self._rules_for(action))

    def status(self) -> GateStatus:
        return GateStatus(
            state=self._state,
            causes=self._causes,
            held=self._holds.held_count,
            quiet=self._holds.quiet,
            armed=self._holds.closed,
            capturing=len(self._holds.capturing),
            passed=self._holds.passed_exempt,
            closes=self._closes,
            closed_mono_ns=self._closed_mono_ns,
        )

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        return self._events.wait(timeout_s)

    def wake(self) -> None:
        self._events.wake()

    def exempt(self) -> AbstractContextManager[None]:
        return self._holds.exempt()

    def trace(self, keep: int) -> AbstractContextManager[Trace]:
        """As in the protocol; counts modules, each at the begin of its forward and its backward."""
        return self._holds.trace(keep)

    def check_handlers(self) -> int:
        replaced = [] if self._pipe is None else self._pipe.replaced_by_others()
        for signo in replaced:
            self._events.emit(EventKind.HANDLER_REPLACED, signo=signo)
        return len(replaced)

    def owner(self, signo: int) -> Owner:
        return owner_shown(signo, self._pipe.handler if self._pipe is not None else None)

    def take_back(self, signo: int) -> None:
        """As in the protocol; by the main thread, at its next bytecode."""
        if (pipe := self._pipe) is not None:
            in_main_thread(lambda: pipe.take_back(signo))

    # --- in the watcher thread ----------------------------------------------------------------

    def _watch(self, pipe: SignalPipe) -> None:
        # signals must interrupt the main thread, the only one that may call chained handlers
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while not self._ending:
            parking = self._state is GateState.PARKING
            for byte, count in runs(pipe.read(_SAMPLE_S if parking else None)):
                if byte == NUDGE:
                    self._take_requests()
                elif byte in self._rules:
                    self._take_signal(self._rules[byte], count)
            if self._state is GateState.PARKING and self._holds.look():
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
                self.marks.requested(request.action, 0, request.mono_ns)
                self._apply(request)

    def _take_signal(self, rule: SignalRule, count: int) -> None:
        now_ns = time.monotonic_ns()
        self._events.emit(EventKind.SIGNAL_RECEIVED, mono_ns=now_ns, signo=rule.signo, count=count)
        causes = rule.causes
        if rule.signo == signal.SIGTSTP and causes == Cause.SLURM and is_foreground():
            causes = Cause.TERMINAL
        self.marks.requested(rule.action, rule.signo, now_ns)
        self._apply(_Request(rule.action, causes, now_ns, rule.signo))

    def _apply(self, request: _Request) -> None:
        if self._state is GateState.STOPPING:
            return
        if request.action is Action.STOP:
            self._set_causes(Cause(0))
            self._events.emit(
                EventKind.STOP_REQUESTED, signo=request.signo, value_ns=request.mono_ns
            )
            self._open(request.mono_ns)
            self._state = GateState.STOPPING
            return
        before = self._causes
        if request.action is Action.PAUSE:
            self._set_causes(before | request.causes)
            self._stop_wanted = self._stop_wanted or Cause.TERMINAL in request.causes
        else:
            self._set_causes(before & ~request.causes)
        if self._causes and not self._holds.closed:
            self._close(request.mono_ns)
        elif not self._causes and self._holds.closed:
            self._open(request.mono_ns)
        else:  # also when nothing changed: whoever asked waits for an answer
            self._events.emit(EventKind.CAUSES_CHANGED)

    def _set_causes(self, causes: Cause) -> None:
        self._causes = self._events.causes = causes

    def _close(self, requested_ns: int) -> None:
        self._closes += 1
        self._requested_ns, self._closed_mono_ns = requested_ns, time.monotonic_ns()
        self._state = GateState.PARKING
        # said before it is done, or a thread could be held at a gate that is not known to be closed
        self._events.emit(EventKind.GATE_CLOSED, value_ns=requested_ns)
        self.marks.gate_closed(self._closes, requested_ns)
        self._holds.close()

    def _park(self) -> None:
        self._state, self._holds.parked = GateState.PARKED, True
        self.marks.at_rest(time.monotonic_ns())
        self._events.emit(
            EventKind.PARKED,
            value_ns=self._requested_ns,
            held=self._holds.held_count,
            quiet=self._holds.quiet,
        )

    def _open(self, requested_ns: int) -> None:
        if not self._holds.closed:
            return
        self._closed_mono_ns, self._state, self._stop_wanted = 0, GateState.RUNNING, False
        self._events.emit(
            EventKind.RESUMED,
            value_ns=requested_ns,
            passed=self._holds.passed_exempt,
            held=self._holds.held_count,
            quiet=self._holds.quiet,
        )
        self.marks.gate_opened(requested_ns, held=self._holds.held_count)
        self._holds.open()

    def _stop_for_terminal(self) -> None:
        """Ctrl-Z: really stop, once parked. Whoever continues us has ended that pause."""
        waited_s = (time.monotonic_ns() - self._closed_mono_ns) / 1e9
        if self._state is GateState.PARKING and waited_s < _TERMINAL_WAIT_S:
            return
        self._stop_wanted = False
        if has_job_control():
            self._events.emit(EventKind.TERMINAL_STOP)
            # to this very thread: sent to the process, it might stop it only after we have gone on
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            self._events.emit(EventKind.TERMINAL_STOP_IGNORED)
        self._apply(_Request(Action.RESUME, Cause.TERMINAL, time.monotonic_ns()))

    # --- small things ---------------------------------------------------------------------------

    def _started_pipe(self, what: str) -> SignalPipe:
        if self._pipe is None:
            raise InstallError(f"the gate cannot {what}: it was not started in this process")
        return self._pipe

    def _rules_for(self, action: Action) -> list[SignalRule]:
        return [rule for rule in self._rules.values() if rule.action is action]

    def _nudge(self) -> None:
        if (pipe := self._pipe) is not None:
            pipe.nudge()

    def _end_in_child(self) -> None:
        if self._pipe is not None:
            self._pipe.after_fork_in_child()
        self._pipe = self._watcher = None
        self._holds.reset_after_fork()
        self._events, self._requests = EventQueue(), queue.SimpleQueue()
        self._causes, self._state, self._closed_mono_ns = Cause(0), GateState.RUNNING, 0


_running: HooksGate | None = None
_start_lock = threading.Lock()


def _after_fork_in_child() -> None:
    """No watcher came along. The handlers stay; they look at the process id, and only chain."""
    global _running, _start_lock
    _start_lock = threading.Lock()
    gate, _running = _running, None
    if gate is not None:
        gate._end_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
