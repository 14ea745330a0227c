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
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as every
from torch.utils._pytree import tree_leaves, tree_map_only

from hydroslurm.core.events import EventKind
from hydroslurm.errors import InstallError
from hydroslurm.gate import protocol
from hydroslurm.gate.handlers import VIEW
from hydroslurm.gate.marks import NvtxMarks
from hydroslurm.gate.protocol import NO_CAUSE, Action, Cause, GateEvent, GateState, Phase

_POLL_S = 0.002
"""Interval at which a held thread checks for release."""
_cuda: Any = torch.cuda


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
    registration, methods = object(), dict[str, Any]()
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
            known = node.metadata.setdefault((registration, name), set())
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

    ``state``: 1, or 0 while paused; ``pauses``: their number so far."""

    def __init__(self, hold: Callable[[str, Phase], None] | None = None) -> None:
        self.state, self.pauses = 1, 0
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
        if not self.state:
            self._hold(type(module).__name__, Phase.FORWARD)

    # without tensors, which the graph would keep alive
    def pre_bwd_exec(self, module: torch.nn.Module) -> None:  # type: ignore[override]
        if not self.state:
            self._hold(type(module).__name__, Phase.BACKWARD)

    post_fwd_exec, post_bwd_exec = pre_fwd_exec, pre_bwd_exec  # type: ignore[assignment]


class HooksGate:
    """Holds a single rank between modules. Has the methods of :class:`NativeGate` that one rank
    needs; start it once.

    Its handlers are Python's, which run in the main thread between two bytecodes. The rank counts
    as parked once a thread is held; others run on until they reach a module. Handlers, requests and
    held threads put calls into a queue; the thread that reads the events makes them.
    """

    name = "hooks"
    granularity = "module boundaries; not functional operators, the loss, the optimizer or copies"

    def __init__(self, *, model: torch.nn.Module | None = None) -> None:
        """``model``: hook its leaf modules; default: every module of the process."""
        self.marks = NvtxMarks()
        self._model, self._running_in = model, 0
        self._calls = queue.SimpleQueue[Callable[[], None]]()
        self._events: list[GateEvent] = []
        self._hook, self._handles = ExecutionOpHook(self._reached), contextlib.ExitStack()
        self._rules: Sequence[protocol.SignalRule] = ()
        self._installed: Sequence[protocol.SignalRule] = ()
        self._claimed, self._continued_ns = set[Action](), 0
        self._causes, self._is_stopping = NO_CAUSE, False
        self._asked_ns = self._closed_ns = self._passed = 0
        self._held, self._exempt = set[int](), set[int]()

    def start(self, rules: Sequence[protocol.SignalRule]) -> dict[int, protocol.SignalOutcome]:
        """Install handlers and hooks. Raises as :meth:`PythonView.take`."""
        self._rules, self._running_in = rules, os.getpid()
        outcomes = VIEW.take(rules, self._deliver)
        self._installed = [rule for rule in rules if not outcomes[rule.signo]]  # 0: INSTALLED
        self._handles = register_ophooks_recursively(self._model, [self._hook])
        return outcomes

    def stop(self) -> int:
        """Open, and remove hooks and handlers. Returns how many handlers others had replaced."""
        replaced, self._running_in, self._causes = self.check_handlers(), 0, NO_CAUSE
        self._claimed.clear()
        VIEW.hide()
        self._handles.close()
        if not self._hook.state:
            self._move(time.monotonic_ns())
        self._is_stopping = False
        self.wake()
        return replaced

    def request(self, action: Action, causes: Cause, signo: int = 0) -> None:
        """Request a pause, resume or stop from inside the process. Returns at once."""
        if self._running_in != os.getpid():
            raise InstallError(f"the gate refuses {action.name}: it was not started here")
        self._calls.put(partial(self._answer, action, causes, signo, time.monotonic_ns()))

    def status(self) -> protocol.GateStatus:
        """Return a snapshot of the gate."""
        state = GateState.STOPPING if self._is_stopping else GateState.RUNNING
        if not self._hook.state:
            state = GateState.PARKED if self._held else GateState.PARKING
        return protocol.GateStatus(
            state=state, causes=self._causes, held=len(self._held), passed=self._passed,
            armed=self._hook.state == 0, closes=self._hook.pauses, closed_mono_ns=self._closed_ns,
        )  # fmt: skip

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        """Wait for events, :meth:`wake` or the timeout; oldest first, maybe none."""
        with contextlib.suppress(queue.Empty):
            self._calls.get(timeout=timeout_s)()
            while True:
                self._calls.get_nowait()()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """Make a blocked :meth:`wait_events` return."""
        self._calls.put(lambda: None)

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Never hold the calling thread within the block. Nests."""
        added = {threading.get_native_id()} - self._exempt
        self._exempt |= added
        try:
            yield
        finally:
            self._exempt -= added

    def claim(self, action: Action) -> None:
        """Handle all signals of an action, without chaining."""
        self._claimed.add(action)
        VIEW.add(rule for rule in self._rules if rule.action is action)

    def unclaim(self, action: Action) -> None:
        """Undo :meth:`claim`: chain again, and restore earlier default dispositions."""
        self._claimed.discard(action)
        VIEW.hide(r for r in self._rules if r.action is action and r not in self._installed)

    def check_handlers(self) -> int:
        """Return how many of our handlers others have replaced; they keep those signals."""
        return sum(not VIEW.shows(rule.signo) for rule in self._installed)

    def _deliver(self, signo: int) -> int:
        """As ``hs_gate_deliver()``: whether to chain; -1 if the signal is not meant for us."""
        (rule,) = (rule for rule in self._rules if rule.signo == signo)
        now_ns = time.monotonic_ns()
        chains = rule.action not in self._claimed
        if self._running_in != os.getpid():
            return -1 if chains else 0
        if signo == signal.SIGCONT:
            self._continued_ns = now_ns
        # both came within one long operator: CPython calls CONT's handler (18) first, then TSTP's
        if signo != signal.SIGTSTP or now_ns - self._continued_ns > 1_000_000:
            self.request(rule.action, rule.causes, signo)
        return int(chains)

    def _answer(self, action: Action, causes: Cause, signo: int, asked_ns: int) -> None:
        stops, pauses = action is Action.STOP, action is Action.PAUSE
        self._causes = self._causes | causes if pauses else self._causes & ~causes
        self._is_stopping |= stops
        kind = EventKind.STOP_REQUESTED if stops else EventKind.SIGNAL_RECEIVED
        what = {"signo": signo, "count": 1, "text": action.name.lower()}
        self._emit(kind, mono_ns=asked_ns, value_ns=asked_ns, **what)
        self._move(asked_ns)

    def _move(self, asked_ns: int) -> None:
        wanted = self._causes & Cause.VACATED if self._is_stopping else self._causes
        if wanted and self._hook.state and self._running_in and not self._is_stopping:
            self._asked_ns, self._closed_ns, self._passed = asked_ns, time.monotonic_ns(), 0
            self._held.clear()
            self._emit(EventKind.GATE_CLOSED, value_ns=asked_ns)
            self._hook.pause()
        elif not self._hook.state and not wanted:
            self._closed_ns, counts = 0, {"held": len(self._held), "passed": self._passed}
            self._emit(EventKind.RESUMED, value_ns=asked_ns, **counts)
            self._hook.resume()
        else:  # even without a change: the caller waits for an answer
            self._emit(EventKind.CAUSES_CHANGED)

    def _reached(self, name: str, phase: Phase) -> None:
        """Hold the calling thread, unless it is exempt, captures a CUDA graph, or was forked."""
        tid, captures = threading.get_native_id(), _cuda.is_initialized()
        captures = captures and _cuda.is_current_stream_capturing()
        self._passed += tid in self._exempt
        if tid in self._exempt or captures or os.getpid() != self._running_in:
            return
        held = (self._hook.pauses, tid, name, phase, time.monotonic_ns())
        self._calls.put(partial(self._note_held, *held))
        try:
            self._hook.sleep_while_paused()
        finally:  # also when Ctrl-C raises KeyboardInterrupt here
            self._calls.put(partial(self._note_released, tid, time.monotonic_ns()))

    def _note_held(self, pause: int, tid: int, name: str, phase: Phase, mono_ns: int) -> None:
        if self._hook.state or pause != self._hook.pauses:
            return  # the gate opened before this call
        first = not self._held
        self._held.add(tid)
        kind = EventKind.FIRST_OPERATOR_HELD if first else EventKind.LATE_OPERATOR_HELD
        self._emit(kind, mono_ns=mono_ns, tid=tid, text=name, phase=phase)
        if first:
            self._emit(EventKind.PARKED, value_ns=self._asked_ns, held=1)

    def _note_released(self, tid: int, mono_ns: int) -> None:
        if tid in self._held and self._hook.state:
            self._held.clear()  # the others of this pause run on, too
            self._emit(EventKind.FIRST_OPERATOR_RELEASED, mono_ns=mono_ns, tid=tid)
        self._held.discard(tid)

    def _emit(self, kind: EventKind, *, mono_ns: int = 0, **fields: Any) -> None:
        fields |= {"mono_ns": mono_ns or time.monotonic_ns(), "epoch_ns": time.time_ns()}
        self._events.append(GateEvent(kind=kind, causes=self._causes, **fields))
