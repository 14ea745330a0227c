"""Operator hooks: Python callbacks around each module's forward and backward; one can hold them.

    pre_fwd_exec -> module.forward -> post_fwd_exec        the module's own hooks
    pre_bwd_exec -> its autograd nodes -> post_bwd_exec    pre-hooks of the nodes around it

Why not torch's full backward hooks: they pass every input and output through an autograd Function
of their own, and a tensor that comes out of it may not be modified in place. ``Linear`` then
``ReLU(inplace=True)`` raises with them, so that hooks on an unmodified script would break it. A
pre-hook on the node that made a tensor leaves the graph as it is: ``pre_bwd_exec`` runs before
the node that made the module's output, ``post_bwd_exec`` before the node that made its input. A
module whose inputs need no gradient (the first one) has no ``post_bwd_exec``; the gate loses
nothing by that.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.modules import module as module_hooks

from hydroslurm.gate.protocol import Phase

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


_registrations = itertools.count()
"""Tells the marks of one registration from those of the next on a node that outlives both."""


class BaseOpHook:
    """What is called around each module. Override what you need.

    The calls come from the thread that runs the forward, and from autograd's threads, with the
    GIL held. An exception ends that forward or backward.
    """

    def pre_fwd_exec(self, module: torch.nn.Module) -> None:
        """Before ``module.forward``."""

    def post_fwd_exec(self, module: torch.nn.Module) -> None:
        """After ``module.forward``; not when it raised."""

    def pre_bwd_exec(self, module: torch.nn.Module) -> None:
        """Before the gradient goes into the module; at least once per backward through it."""

    def post_bwd_exec(self, module: torch.nn.Module) -> None:
        """After the gradient came out of the module; absent where no input needs one."""


class HoldObserver(Protocol):
    """Who wants to know what happens at the hook. Called with no lock held."""

    def thread_seen(self) -> None:
        """The calling thread runs modules; called at each pass, so it must be cheap."""

    def may_pass(self) -> bool:
        """Whether the calling thread is let through a closed hook."""

    def held(self, name: str, phase: Phase) -> None:
        """The calling thread is about to wait."""

    def released(self) -> None:
        """The calling thread runs again."""

    def passed(self, name: str, phase: Phase) -> None:
        """A trace is on, and a module begins its forward or its backward."""


class ExecutionOpHook(BaseOpHook):
    """Holds every thread that comes by while it is closed, on a condition variable.

    Safe in any thread. The lock is re-entrant, for a Python signal handler may run a module on a
    thread that is held.
    """

    def __init__(self, observer: HoldObserver | None = None) -> None:
        self._observer = observer
        self._condition = threading.Condition()
        self._closings = 0
        self._closed = False
        self._tracing = False
        self._watched = False  # closed or tracing: the one thing that is looked at while running

    @property
    def closed(self) -> bool:
        """Threads are being held."""
        return self._closed

    def close(self) -> None:
        """Hold every thread at its next hook."""
        with self._condition:
            self._closings += 1
            self._closed = True
            self._watched = True

    def open(self) -> None:
        """Let all go."""
        with self._condition:
            self._closed = False
            self._watched = self._tracing
            self._condition.notify_all()

    def trace(self, *, on: bool) -> None:
        """Tell the observer of each module that passes, or stop doing so."""
        with self._condition:
            self._tracing = on
            self._watched = on or self._closed

    def reset_after_fork(self) -> None:
        """In a forked child: open, with a lock that no thread of the parent holds."""
        self._condition = threading.Condition()
        self._closed = self._tracing = self._watched = False

    def pre_fwd_exec(self, module: torch.nn.Module) -> None:
        self._pass(module, Phase.FORWARD, begins=True)

    def post_fwd_exec(self, module: torch.nn.Module) -> None:
        self._pass(module, Phase.FORWARD, begins=False)

    def pre_bwd_exec(self, module: torch.nn.Module) -> None:
        self._pass(module, Phase.BACKWARD, begins=True)

    def post_bwd_exec(self, module: torch.nn.Module) -> None:
        self._pass(module, Phase.BACKWARD, begins=False)

    def _pass(self, module: torch.nn.Module, phase: Phase, *, begins: bool) -> None:
        observer = self._observer
        if observer is not None:
            observer.thread_seen()
        if not self._watched:
            return
        name = type(module).__name__
        if self._tracing and begins and observer is not None:
            observer.passed(name, phase)
        if self._closed and (observer is None or not observer.may_pass()):
            self._hold(name, phase)

    def _hold(self, name: str, phase: Phase) -> None:
        while self._closed:
            closing = self._closings
            if self._observer is not None:
                self._observer.held(name, phase)
            try:
                with self._condition:
                    # opened and closed again before this thread woke: it is held anew, and says so
                    while self._closed and self._closings == closing:
                        self._condition.wait()
            finally:  # Ctrl-C raises KeyboardInterrupt out of wait()
                if self._observer is not None:
                    self._observer.released()


class HookHandles:
    """Hooks that were registered together; :meth:`remove` takes them out.

    Graphs that were built before still have pre-hooks on their nodes. These do nothing after
    :meth:`remove`, and go away with their graph.
    """

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self.active = True

    def add(self, handle: RemovableHandle) -> None:
        self._handles.append(handle)

    def remove(self) -> None:
        """Take all hooks out; a second call does nothing."""
        self.active = False
        while self._handles:
            self._handles.pop().remove()

    def __len__(self) -> int:
        return len(self._handles)


def register_ophooks_recursively(
    module: torch.nn.Module, hooks: Sequence[BaseOpHook]
) -> HookHandles:
    """Register the hooks on every leaf module in ``module`` that has parameters or buffers.

    A leaf that occurs twice gets its hooks once. Returns the handles: the caller removes them.
    """
    handles = HookHandles()
    before, after = _forward_hooks(hooks, handles)
    for leaf in leaves(module):
        handles.add(leaf.register_forward_pre_hook(before))
        handles.add(leaf.register_forward_hook(after))
    return handles


def register_global_ophooks(hooks: Sequence[BaseOpHook]) -> HookHandles:
    """Register the hooks on every module of this process, those made later included.

    All modules get the forward hooks; the backward ones go to those that have parameters or
    buffers of their own.
    """
    handles = HookHandles()
    before, after = _forward_hooks(hooks, handles)
    handles.add(module_hooks.register_module_forward_pre_hook(before))
    handles.add(module_hooks.register_module_forward_hook(after))
    return handles


def leaves(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules without children that have parameters or buffers, each once."""
    for candidate in module.modules():
        if next(candidate.children(), None) is None and _has_state(candidate):
            yield candidate


def _has_state(module: torch.nn.Module) -> bool:
    return bool(module._parameters or module._buffers)


def _forward_hooks(
    hooks: Sequence[BaseOpHook], handles: HookHandles
) -> tuple[Callable[..., None], Callable[..., None]]:
    hooks = tuple(hooks)
    key = f"hydroslurm.ophooks.{next(_registrations)}"

    def before(module: torch.nn.Module, _args: Any) -> None:
        # torch.compile traces through hooks; what is compiled is one operator and is left alone
        if torch.compiler.is_compiling():
            return
        for hook in hooks:
            hook.pre_fwd_exec(module)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for hook in hooks:
            hook.post_fwd_exec(module)
        if _has_state(module) and torch.is_grad_enabled():
            entry = [hook.pre_bwd_exec for hook in hooks]
            _before_nodes_of(output, entry, module, handles, f"{key}.pre")
            leave = [hook.post_bwd_exec for hook in hooks]
            _before_nodes_of(args, leave, module, handles, f"{key}.post")

    return before, after


def _before_nodes_of(
    value: Any,
    calls: Sequence[Callable[[torch.nn.Module], None]],
    module: torch.nn.Module,
    handles: HookHandles,
    key: str,
) -> None:
    """Call ``calls`` before each autograd node that made a tensor in ``value``.

    Once per node and module: a node that outlives its step (a retained graph) would otherwise
    collect one more pre-hook at every forward.
    """
    for tensor in _tensors(value):
        node = tensor.grad_fn
        if node is None:
            continue
        known = node.metadata.setdefault(key, set())  # type: ignore[attr-defined]  # a property
        if module in known:
            continue
        known.add(module)

        def prehook(_gradients: Any) -> None:
            if handles.active:
                for call in calls:
                    call(module)

        node.register_prehook(prehook)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors in a tensor, and in tuples, lists and dictionaries of tensors, one level deep."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return ()
    return [item for item in value if isinstance(item, torch.Tensor)]
