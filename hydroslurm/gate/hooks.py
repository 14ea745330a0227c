"""HydroJobSche's hook interface, and with it a gate for one rank where no native one can be built.

    pre_fwd_exec -> module.forward -> post_fwd_exec        the module's own hooks
    pre_bwd_exec -> its autograd nodes -> post_bwd_exec    pre-hooks of the nodes around it

Torch's full backward hooks pass every tensor through their own autograd Function, whose output may
not be modified in place: ``Linear`` then ``ReLU(inplace=True)`` raises. A pre-hook on the node that
made a tensor leaves the graph unchanged. A module whose inputs need no gradient (the first one) has
no ``post_bwd_exec``.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as every
from torch.utils._pytree import tree_leaves, tree_map_only

from hydroslurm.core.events import EventKind
from hydroslurm.errors import InstallError
from hydroslurm.gate import protocol
from hydroslurm.gate.marks import NvtxMarks
from hydroslurm.gate.protocol import NO_CAUSE, Action, Cause, GateEvent, GateState, Phase
from hydroslurm.gate.python_handlers import PythonHandlers
from hydroslurm.gate.python_threads import RestWatch

_POLL_S = 0.002
"""Interval at which a held thread checks for release, and the gate for threads at rest."""
_cuda: Any = torch.cuda
_registrations = itertools.count()
"""Distinguishes registrations on a node that outlives them."""


class BaseOpHook:
    """Callbacks around each module. Override those you need; a method may omit arguments after
    ``module``.

    They run in the thread of the forward and in autograd's threads, with the GIL. An exception ends
    that forward or backward. Tensors in the arguments of the last two are detached, and live as
    long as the graph.
    """

    def pre_fwd_exec(self, module: torch.nn.Module, *args: Any) -> None:
        """Before ``module.forward``; ``args``: its inputs, as one tuple."""

    def post_fwd_exec(self, module: torch.nn.Module, *args: Any) -> None:
        """After ``module.forward``, unless it raised; ``args``: its inputs, and its output."""

    def pre_bwd_exec(self, module: torch.nn.Module, input: Any, output: Any) -> None:
        """Before the gradient enters the module; at least once per backward through it."""

    def post_bwd_exec(self, module: torch.nn.Module, input: Any) -> None:
        """After the gradient has left the module; not called if no input needs one."""


def register_ophooks_recursively(
    module: torch.nn.Module | None, hooks: Sequence[BaseOpHook]
) -> contextlib.ExitStack:
    """Register the hooks once on every leaf module in ``module`` with parameters or buffers;
    ``None``: on every module of this process, including later ones. ``close()`` of the returned
    stack removes them; those on nodes of older graphs then do nothing.
    """
    key, methods = f"hydroslurm.hooks.{next(_registrations)}", dict[str, Any]()
    for name in ("pre_fwd_exec", "post_fwd_exec", "pre_bwd_exec", "post_bwd_exec"):
        own = [hook for hook in hooks if getattr(type(hook), name) is not getattr(BaseOpHook, name)]
        methods[name] = [(getattr(hook, name), _wanted(getattr(hook, name))) for hook in own]

    def call(name: str, module: torch.nn.Module, *args: Any) -> None:
        for method, wanted in methods.get(name, ()):
            method(module, *args[:wanted])

    # torch.compile traces through hooks; a compiled region is one operator and gets none
    def before(module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            call("pre_fwd_exec", module, args)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        call("post_fwd_exec", module, args, output)
        if _has_state(module) and torch.is_grad_enabled():
            before_nodes(output, "pre_bwd_exec", module, args, output)
            before_nodes(args, "post_bwd_exec", module, args)

    def before_nodes(value: Any, name: str, module: torch.nn.Module, *args: Any) -> None:
        """Add one pre-hook per node and module: a node that outlives its step (a retained graph)
        would otherwise collect one per forward."""
        if not methods.get(name):
            return
        wanted = max(wanted for _, wanted in methods[name])
        # detach: tensors with their graph would keep the node alive
        kept = tree_map_only(torch.Tensor, torch.Tensor.detach, args[:wanted]) if wanted else ()
        nodes = [getattr(tensor, "grad_fn", None) for tensor in tree_leaves(value)]
        for node in filter(None, nodes):
            known = node.metadata.setdefault(f"{key}.{name}", set())
            if module not in known:
                known.add(module)
                node.register_prehook(lambda _gradients: call(name, module, *kept))

    places = [(every.register_module_forward_pre_hook, every.register_module_forward_hook)]
    if module is not None:
        leaves = [m for m in module.modules() if not [*m.children()] and _has_state(m)]
        places = [(leaf.register_forward_pre_hook, leaf.register_forward_hook) for leaf in leaves]
    handles = contextlib.ExitStack()
    handles.callback(methods.clear)
    for register_before, register_after in places:
        handles.callback(register_before(before).remove)
        handles.callback(register_after(after).remove)
    return handles


def _wanted(method: Callable[..., None]) -> int:
    """Return how many arguments the method takes after the module."""
    kinds = [parameter.kind for parameter in inspect.signature(method).parameters.values()]
    named = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD) - 1
    return 2 if inspect.Parameter.VAR_POSITIONAL in kinds else named


def _has_state(module: torch.nn.Module) -> bool:
    return bool(module._parameters or module._buffers)


class ExecutionOpHook(BaseOpHook):
    """Calls ``hold``, by default a sleep, in every thread that reaches a hook while paused.

    ``state``: 1, or 0 while paused; ``pauses``: their number so far; ``threads``: those that have
    reached a hook."""

    def __init__(self, hold: Callable[[str, Phase], None] | None = None) -> None:
        self.state, self.pauses = 1, 0
        self.threads = RestWatch()
        self._hold = hold or (lambda _name, _phase: self.sleep_while_paused())

    def pause(self) -> None:
        """Hold every thread at its next hook."""
        self.pauses += self.state
        self.state = 0

    def resume(self) -> None:
        """Release all threads."""
        self.state = 1

    def sleep_while_paused(self) -> None:
        """Sleep until this pause ends. Python's signal handlers run meanwhile."""
        pauses = self.pauses
        while not self.state and self.pauses == pauses:
            time.sleep(_POLL_S)

    def pre_fwd_exec(self, module: torch.nn.Module, *_: Any) -> None:
        self._come_by(module, Phase.FORWARD)

    # without tensors, which the graph would keep alive
    def pre_bwd_exec(self, module: torch.nn.Module) -> None:  # type: ignore[override]
        self._come_by(module, Phase.BACKWARD)

    post_fwd_exec, post_bwd_exec = pre_fwd_exec, pre_bwd_exec  # type: ignore[assignment]

    def _come_by(self, module: torch.nn.Module, phase: Phase) -> None:
        self.threads.see()
        if not self.state:
            self._hold(type(module).__name__, phase)


class HooksGate:
    """Holds the threads of a single rank between modules. Has the methods of :class:`NativeGate`;
    its state changes in the thread that reads the events, the controller's.
    """

    name = "hooks"
    granularity = "module boundaries; not functional operators, the loss, the optimizer or copies"

    def __init__(self, *, model: torch.nn.Module | None = None) -> None:
        """``model``: hook its leaf modules; default: every module of the process."""
        self.marks = NvtxMarks()
        self._model, self._running_in = model, 0
        self._inbox = queue.SimpleQueue[GateEvent | Callable[[], None] | None]()
        """Events, and calls to make before them; handlers may put both. None wakes the reader."""
        self._hook, self._handles = ExecutionOpHook(self._reached), contextlib.ExitStack()
        handlers = self._handlers = PythonHandlers(self._ask)
        self.claim, self.unclaim = handlers.claim, handlers.unclaim
        self.check_handlers, self.exempt = handlers.count_replaced, self._hook.threads.exempt
        self._state, self._causes, self._is_stopping = GateState.RUNNING, NO_CAUSE, False
        self._asked_ns = self._closed_ns = self._passed = self._quiet = 0
        self._holds = self._releases = itertools.count()  # next() is atomic
        self._held, self._capturing = set[int](), set[int]()

    def start(self, rules: Sequence[protocol.SignalRule]) -> dict[int, protocol.SignalOutcome]:
        """Install hooks and handlers; raises as :class:`PythonHandlers`."""
        outcomes = self._handlers.install(rules)
        self._hook.resume()
        self._hook.pauses = 0
        self._state, self._is_stopping, self._running_in = GateState.RUNNING, False, os.getpid()
        self._handles = register_ophooks_recursively(self._model, [self._hook])
        return outcomes

    def stop(self) -> int:
        """Open, and remove hooks and handlers. Returns how many handlers others had replaced."""
        replaced, self._running_in, self._causes = self._handlers.restore(), 0, NO_CAUSE
        if not self._hook.state:
            self._move(time.monotonic_ns())
        self._state = GateState.RUNNING
        self._handles.close()
        self.wake()
        return replaced

    def request(self, action: Action, causes: Cause) -> None:
        """Request a pause, resume or stop from inside the process. Returns at once."""
        if self._running_in != os.getpid():
            raise InstallError(f"the gate refuses {action.name}: it was not started here")
        self._ask(action, causes)

    def status(self) -> protocol.GateStatus:
        """Return a snapshot of the gate."""
        return protocol.GateStatus(
            state=self._state, causes=self._causes, held=len(self._held), quiet=self._quiet,
            armed=self._hook.state == 0, capturing=len(self._capturing), passed=self._passed,
            closes=self._hook.pauses, closed_mono_ns=self._closed_ns,
        )  # fmt: skip

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        """Wait for events, :meth:`wake` or the timeout; oldest first, maybe none."""
        parking = self._state is GateState.PARKING
        events = self._take(_POLL_S if parking and timeout_s != 0 else timeout_s)
        quiet = self._hook.threads.quiet(but=self._held) if parking else None
        if quiet is not None and self._state is GateState.PARKING:
            self._state, self._quiet, held = GateState.PARKED, quiet, len(self._held)
            self._emit(EventKind.PARKED, value_ns=self._asked_ns, held=held, quiet=quiet)
        return events

    def wake(self) -> None:
        """Make a blocked :meth:`wait_events` return."""
        self._inbox.put(None)

    def _take(self, timeout_s: float | None) -> list[GateEvent]:
        """Wait for the first item, then take all."""
        events: list[GateEvent] = []
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=timeout_s)
            while True:
                if isinstance(item, GateEvent):
                    events.append(item)
                elif item is not None:
                    item()
                item = self._inbox.get_nowait()
        return events

    def _ask(self, action: Action, causes: Cause, signo: int = 0) -> None:
        self._inbox.put(partial(self._answer, action, causes, signo, time.monotonic_ns()))

    def _answer(self, action: Action, causes: Cause, signo: int, asked_ns: int) -> None:
        if self._running_in != os.getpid():
            return
        self._causes = self._causes | causes if action is Action.PAUSE else self._causes & ~causes
        self._is_stopping |= action is Action.STOP
        kind = EventKind.STOP_REQUESTED if action is Action.STOP else EventKind.SIGNAL_RECEIVED
        what = {"signo": signo, "count": 1, "text": action.name.lower()}
        self._emit(kind, mono_ns=asked_ns, value_ns=asked_ns, **what)
        self._move(asked_ns)

    def _move(self, asked_ns: int) -> None:
        wanted = self._causes & Cause.VACATED if self._is_stopping else self._causes
        if wanted and self._hook.state and not self._is_stopping:
            self._state, self._asked_ns = GateState.PARKING, asked_ns
            self._closed_ns, self._passed, self._quiet = time.monotonic_ns(), 0, 0
            self._holds, self._releases = itertools.count(), itertools.count()
            self._capturing.clear()
            self._emit(EventKind.GATE_CLOSED, value_ns=asked_ns)  # before any thread is held
            self._hook.pause()
        elif not self._hook.state and not wanted:
            self._state, self._closed_ns, held = GateState.RUNNING, 0, len(self._held)
            self._emit(EventKind.RESUMED, value_ns=asked_ns, held=held, passed=self._passed)
            self._hook.resume()
        else:  # even without a change: the caller waits for an answer
            self._emit(EventKind.CAUSES_CHANGED)
        if self._is_stopping and self._hook.state:
            self._state = GateState.STOPPING

    def _reached(self, name: str, phase: Phase) -> None:
        """Hold the calling thread, which has reached a closed hook."""
        tid = threading.get_native_id()
        while not self._hook.state and not self._may_pass(tid):
            releases, late = self._releases, self._state is GateState.PARKED
            self._held.add(tid)
            if next(self._holds) == 0 or late:
                kind = EventKind.LATE_OPERATOR_HELD if late else EventKind.FIRST_OPERATOR_HELD
                self._emit(kind, tid=tid, text=name, phase=phase)
            try:
                self._hook.sleep_while_paused()
            finally:  # also when Ctrl-C raises KeyboardInterrupt here
                self._held.discard(tid)
                if next(releases) == 0:
                    self._emit(EventKind.FIRST_OPERATOR_RELEASED, tid=tid)

    def _may_pass(self, tid: int) -> bool:
        """Whether the thread is exempt, in a forked child, or captures a CUDA graph, which must not
        wait."""
        if tid in self._hook.threads.exempted:
            self._passed += 1
        elif _cuda.is_initialized() and _cuda.is_current_stream_capturing():
            self._capturing.add(tid)
        else:
            return os.getpid() != self._running_in
        return True

    def _emit(self, kind: EventKind, *, mono_ns: int = 0, **fields: Any) -> None:
        fields |= {"mono_ns": mono_ns or time.monotonic_ns(), "epoch_ns": time.time_ns()}
        self._inbox.put(GateEvent(kind=kind, causes=self._causes, **fields))
