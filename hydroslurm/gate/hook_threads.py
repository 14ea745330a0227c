"""The training threads' side of the module-hook gate: which are held, which may pass, which have
gone quiet."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core.events import EventKind
from hydroslurm.errors import GateError
from hydroslurm.gate.marks import NvtxMarks
from hydroslurm.gate.ophooks import (
    ExecutionOpHook,
    HookHandles,
    register_global_ophooks,
    register_ophooks_recursively,
)
from hydroslurm.gate.protocol import Operator, Phase, Trace

if TYPE_CHECKING:
    import torch

QUIET_NS = 20_000_000
"""How long a thread must have slept to be quiet. Longer than a wait for the GIL (5 ms), or for the
other threads of a parallel operator, usually takes."""

_TASKS = Path("/proc/self/task")


class Holds:
    """The hooks, and what threads do at them. The gate's watcher closes and opens.

    Attributes:
        parked: set by the watcher once all are held or quiet; a thread held after that is late.
        passed_exempt: how often exempt threads have passed since the gate closed.
        capturing: native ids of threads let through by a CUDA graph capture since then.
        quiet: threads that sleep elsewhere, as of the last :meth:`check`.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module | None,
        emit: Callable[..., None],
        marks: NvtxMarks,
        on_held: Callable[[], None],
    ) -> None:
        """
        Args:
            model: hook its leaf modules; default: every module of the process.
            emit: :meth:`EventQueue.emit`.
            on_held: called in a thread that is about to wait.
        """
        self.parked = False
        self.passed_exempt = 0
        self.capturing: set[int] = set()
        self.quiet = 0
        self._model = model
        self._emit = emit
        self._marks = marks
        self._on_held = on_held
        self._valve = ExecutionOpHook(self)
        self._hooks: HookHandles | None = None
        self._threads = ThreadWatch()
        self._local = threading.local()
        # keyed by native thread id; storing and removing one key is atomic
        self._held: dict[int, None] = {}
        self._exempt: dict[int, None] = {}
        # next() is atomic too, and who gets 0 is the first
        self._reports = itertools.count()
        self._releases = itertools.count()
        self._traced: list[Operator] | None = None
        self._trace_count = itertools.count()
        self._trace_keep = 0

    @property
    def closed(self) -> bool:
        return self._valve.closed

    @property
    def held_count(self) -> int:
        return len(self._held)

    def add_hooks(self) -> None:
        """Register the hooks, once."""
        if self._hooks is not None:
            return
        if self._model is None:
            self._hooks = register_global_ophooks([self._valve])
        else:
            self._hooks = register_ophooks_recursively(self._model, [self._valve])

    def remove_hooks(self) -> None:
        """Take the hooks out; a trace that is on keeps them until it ends."""
        if self._hooks is not None and self._traced is None:
            self._hooks.remove()
            self._hooks = None

    def close(self) -> None:
        """Begin to hold."""
        self._reports, self._releases = itertools.count(), itertools.count()
        self.parked, self.passed_exempt, self.quiet, self.capturing = False, 0, 0, set()
        self._threads.begin()
        self._valve.close()

    def open(self) -> None:
        """Let all go."""
        self.parked = False
        self._valve.open()

    def check(self) -> bool:
        """Whether the main thread and every other that runs modules is held or quiet.

        Call it repeatedly while the gate is closed: a thread is quiet only after a while.
        """
        quiet = self._threads.quiet(excluding=(*self._held, *self._exempt))
        self.quiet = quiet or 0
        return quiet is not None

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Within it the calling thread is never held."""
        tid = threading.get_native_id()
        before = tid in self._exempt
        self._exempt[tid] = None
        try:
            yield
        finally:
            if not before:
                self._exempt.pop(tid, None)

    @contextlib.contextmanager
    def trace(self, keep: int) -> Iterator[Trace]:
        """Within it each module that begins is counted; an "operator" is a module's class name.

        Raises:
            GateError: a trace is on already.
        """
        if self._traced is not None:
            raise GateError("a trace is on already; end it before the next one begins")
        had_hooks = self._hooks is not None
        trace, self._traced = Trace(), []
        self._trace_count, self._trace_keep = itertools.count(), keep
        self.add_hooks()
        self._valve.trace(on=True)
        try:
            yield trace
        finally:
            self._valve.trace(on=False)
            trace.count, trace.operators = next(self._trace_count), tuple(self._traced)
            self._traced = None
            if not had_hooks:
                self.remove_hooks()

    def reset_after_fork(self) -> None:
        """In a forked child: nothing is held, nothing is hooked."""
        self._valve.reset_after_fork()
        self._traced, self._held, self._exempt = None, {}, {}
        self.parked = False
        self.remove_hooks()

    # --- called by the hook, in the thread that reaches it

    def thread_seen(self) -> None:
        self._threads.see()

    def may_pass(self) -> bool:
        """Exempt threads pass; so does a CUDA graph capture, which waiting would break."""
        tid = threading.get_native_id()
        if tid in self._exempt:
            self.passed_exempt += 1
            return True
        torch = sys.modules["torch"]  # `import` could wait for a lock that a held thread has
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self.capturing.add(tid)
            return True
        return False

    def held(self, name: str, phase: Phase) -> None:
        tid = threading.get_native_id()
        self._held[tid] = None
        self._local.releases = self._releases  # of this pause: the next may begin before we wake
        self._local.marked = self._marks.held()
        if self.parked:
            self._emit(EventKind.LATE_OPERATOR_HELD, tid=tid, text=name, phase=phase)
        elif next(self._reports) == 0:
            self._emit(EventKind.FIRST_OPERATOR_HELD, tid=tid, text=name, phase=phase)
        self._on_held()

    def released(self) -> None:
        tid = threading.get_native_id()
        self._held.pop(tid, None)
        if self._local.marked:
            self._marks.released()
        if next(self._local.releases) == 0:
            self._marks.running()
            self._emit(EventKind.FIRST_OPERATOR_RELEASED, tid=tid)

    def passed(self, name: str, phase: Phase) -> None:
        traced = self._traced
        if traced is not None and next(self._trace_count) < self._trace_keep:
            tid = threading.get_native_id()
            traced.append(Operator(name, phase, tid, time.monotonic_ns()))


class ThreadWatch:
    """Which threads run modules, and whether those that are not held have gone quiet.

    A thread that waits for data, in a collective or for a device reaches no hook, yet it issues
    nothing. It is quiet when the kernel says that it sleeps and it has had no processor time for a
    while. :meth:`see` takes no lock.
    """

    def __init__(self) -> None:
        self._native_ids: dict[int, int] = {}  # by Python's thread ident
        self._asleep: dict[int, tuple[str, int]] = {}  # native id -> (processor time, since)

    def see(self) -> None:
        """The calling thread runs modules."""
        ident = threading.get_ident()
        if ident not in self._native_ids:
            self._native_ids[ident] = threading.get_native_id()

    def begin(self) -> None:
        """Forget who was asleep: a new pause has begun."""
        self._asleep = {}

    def quiet(self, *, excluding: Collection[int]) -> int | None:
        """How many threads are quiet, when all but the excluded ones are; None while one is busy.

        The main thread counts always. ``excluding`` holds native ids. Needs at least two calls in
        one pause, :data:`QUIET_NS` apart, before a thread is quiet.
        """
        main = threading.main_thread()
        known = {main.native_id or 0, *list(self._native_ids.values())}
        quiet = [self._is_quiet(native_id) for native_id in known - set(excluding)]
        return len(quiet) if all(quiet) else None

    def _is_quiet(self, native_id: int) -> bool:
        now_ns = time.monotonic_ns()
        try:
            state = (_TASKS / f"{native_id}/stat").read_text().rpartition(") ")[2][0]
            used = (_TASKS / f"{native_id}/schedstat").read_text().split()[0]
        except (OSError, IndexError):
            self._forget(native_id)
            return True
        if state not in "SD" or self._asleep.get(native_id, ("", 0))[0] != used:
            self._asleep[native_id] = (used, now_ns)
            return False
        return now_ns - self._asleep[native_id][1] >= QUIET_NS

    def _forget(self, native_id: int) -> None:
        """A thread that has ended; its ident may come back with another native id."""
        for ident, known in list(self._native_ids.items()):
            if known == native_id:
                self._native_ids.pop(ident, None)
