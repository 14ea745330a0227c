"""The module-hook gate: for machines without a compiler. Pure Python, the same rules as native.

    signal -> CPython's C handler -> pipe -> watcher thread: close or open (hook_signals.py,
    request -> queue, pipe        ->                                        hook_watcher.py)
    training thread: waits at its next module boundary (ophooks.py, hook_threads.py)

What it misses: everything that is not a module. Functional operators, the loss, the optimizer and
copies are not held; a backward is held only at the modules that it passes; a compiled region is
one piece. And the hooks cost time while nothing is paused.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from hydroslurm.core.events import EventKind
from hydroslurm.errors import AlreadyInstalled, InstallError
from hydroslurm.gate.handlers import in_main_thread, owner_shown
from hydroslurm.gate.hook_signals import SignalPipe
from hydroslurm.gate.hook_threads import Holds
from hydroslurm.gate.hook_watcher import EventQueue, Watcher
from hydroslurm.gate.marks import NvtxMarks
from hydroslurm.gate.protocol import (
    Action,
    Cause,
    GateEvent,
    GateStatus,
    Owner,
    SignalOutcome,
    SignalRule,
    Trace,
)

if TYPE_CHECKING:
    import torch


class HooksGate:
    """Holds training threads at module boundaries; for the methods see ``protocol.Gate``.

    :meth:`start` with signals, and the :meth:`stop` after it, belong to the main thread; the rest
    may be called from any.
    """

    def __init__(self, *, model: torch.nn.Module | None = None) -> None:
        """``model``: hook its leaf modules; default: every module of the process."""
        self.marks = NvtxMarks()
        self._events = EventQueue()
        self._holds = Holds(
            model=model, emit=self._events.emit, marks=self.marks, on_held=self._nudge
        )
        self._watcher = Watcher(holds=self._holds, events=self._events, marks=self.marks)
        self._pipe: SignalPipe | None = None
        self._rules: Sequence[SignalRule] = ()

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
                self._pipe, self._rules = pipe, rules
                self._watcher.start(pipe, {rule.signo: rule for rule in rules})
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
            pipe = self._pipe
            if _running is not self or pipe is None:
                return 0
            replaced = pipe.restore()
            self._watcher.stop(pipe)
            self._holds.remove_hooks()
            self._pipe = _running = None
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
        self._watcher.add_request(action, causes)
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
            state=self._watcher.state,
            causes=self._watcher.causes,
            held=self._holds.held_count,
            quiet=self._holds.quiet,
            armed=self._holds.closed,
            capturing=len(self._holds.capturing),
            passed=self._holds.passed_exempt,
            closes=self._watcher.closes,
            closed_mono_ns=self._watcher.closed_mono_ns,
        )

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        return self._events.wait(timeout_s)

    def wake(self) -> None:
        self._events.wake()

    def exempt(self) -> AbstractContextManager[None]:
        return self._holds.exempt()

    def trace(self, keep: int) -> AbstractContextManager[Trace]:
        """As in the protocol; counts modules, each when its forward and its backward begin."""
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

    def _started_pipe(self, what: str) -> SignalPipe:
        if self._pipe is None:
            raise InstallError(f"the gate cannot {what}: it was not started in this process")
        return self._pipe

    def _rules_for(self, action: Action) -> list[SignalRule]:
        return [rule for rule in self._rules if rule.action is action]

    def _nudge(self) -> None:
        if (pipe := self._pipe) is not None:
            pipe.nudge()

    def _end_in_child(self) -> None:
        if self._pipe is not None:
            self._pipe.after_fork_in_child()
        self._pipe = None
        self._events.reset_after_fork()
        self._holds.reset_after_fork()
        self._watcher.reset_after_fork()


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
