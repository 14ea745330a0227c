"""The native gate as Python sees it: :class:`NativeGate`, on top of the binding."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydroslurm.errors import AlreadyInstalled, GateError, GateSelfTestFailed, InstallError
from hydroslurm.gate import binding, build, compiler
from hydroslurm.gate.handlers import NOBODY, OURS, VIEW, address_of
from hydroslurm.gate.marks import Marks
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

_READ_AT_ONCE = 64


class NativeGate:
    """Every operator of every training thread is a point where the rank can be held.

    There is one gate per process, whatever the number of these objects. All methods may be called
    from any thread. The contract is that of ``native/gate.h``.
    """

    name = "native"
    granularity = (
        "every operator; one compiled region, or one replay of a CUDA graph, counts as one"
    )

    def __init__(self, library: Path | None = None) -> None:
        """Load the gate; build it when there is none for this torch yet (ten seconds, once).

        Raises:
            NoCompiler: it has to be built, and there is no C++ compiler.
            GateSelfTestFailed: it does not see the operators of this torch.
            GateError: it can neither be built nor loaded.
        """
        self.path, self._library = (library, binding.bind(library)) if library else _load()
        self.marks = Marks(self._library)
        self._event_fd = -1
        self._started_by = 0
        self._rules: tuple[SignalRule, ...] = ()
        self._check_sees_operators()

    def start(self, rules: Sequence[SignalRule]) -> dict[int, SignalOutcome]:
        """Start the watcher and install the handlers; on failure nothing is left behind.

        Raises:
            AlreadyInstalled: it runs in this process.
            InstallError: the table is bad, or a handler could not be installed.
        """
        table = (binding.Signal * len(rules))(*[binding.signal_line(rule) for rule in rules])
        event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        result = self._library.hs_gate_start(table, len(rules), event_fd)
        if result < 0:
            os.close(event_fd)
            if result == -errno.EALREADY:
                raise AlreadyInstalled("the gate runs in this process already; stop it first")
            bad = [
                f"signal {line.signo}: {os.strerror(-line.result)}"
                for line in table
                if line.result < 0
            ]
            raise InstallError(
                f"the gate was not started: {'; '.join(bad) or os.strerror(-result)}"
            )
        self._close_event_fd()
        self._event_fd, self._started_by = event_fd, os.getpid()
        outcomes = {line.signo: SignalOutcome(line.result) for line in table}
        self._rules = tuple(rules)
        installed = [r for r in rules if outcomes[r.signo] is SignalOutcome.INSTALLED]
        VIEW.show(installed, self._library.hs_gate_deliver)
        return outcomes

    def stop(self) -> int:
        """Open, disarm, end the watcher, restore. Returns how many handlers others had replaced.

        A thread that is in :meth:`wait_events` wakes up; what is left to read stays readable.
        """
        self._started_by = 0
        replaced = int(self._library.hs_gate_stop())
        VIEW.hide()
        self.wake()
        return replaced

    def request(self, action: Action, causes: Cause) -> None:
        """Ask for a pause, a resume or a stop from inside the process. Returns at once.

        Raises:
            InstallError: the gate does not run in this process, or the request makes no sense.
        """
        result = self._library.hs_gate_request(action, causes)
        _require(result, f"the gate refuses {action.name} for {causes.names()}")

    def let_through(self, n: int) -> None:
        """Let the training threads run, while the gate stays closed, until ``n`` more collectives
        of torch.distributed have been issued. Returns at once.

        Each thread is then held before the first collective beyond that allowance; all its other
        operators pass. Further calls add to the allowance, which is lost when the gate opens. With
        0, or an open gate, nothing happens. A LET_THROUGH event says when it is in force, and a
        PARKED after it that all threads have come to rest.

        Raises:
            InstallError: the gate does not run in this process, or ``n`` is out of range.
        """
        # ctypes would cut a larger number to its lowest bits
        result = self._library.hs_gate_let_through(n) if abs(n) < 1 << 63 else -errno.EINVAL
        _require(result, f"the gate lets no {n} collectives through")

    def hold_here(self) -> None:
        """Undo :meth:`let_through`: what is left of the allowance is lost, and every thread that is
        not held is held at its next operator of any kind. Raises as it does. Returns at once."""
        _require(self._library.hs_gate_hold_here(), "the gate holds nobody")

    def claim(self, action: Action) -> int:
        """Handle every signal of the table that has this action, including those that were left
        alone because nobody handled them, and call no old handler: the caller is responsible for
        what follows. A handler that somebody put over ours since is replaced. Returns how many
        signals are handled.

        Raises:
            InstallError: the gate does not run in this process.
        """
        listening = self._library.hs_gate_claim(action, 1)
        _require(listening, f"the signals for {action.name} cannot be taken over")
        VIEW.add(rule for rule in self._rules if rule.action is action and _is_caught(rule))
        return int(listening)

    def unclaim(self, action: Action) -> None:
        """Undo :meth:`claim`: chain again, and restore the default where it was before."""
        result = self._library.hs_gate_claim(action, 0)
        _require(result, f"the signals for {action.name} cannot be given back")
        VIEW.hide(r for r in self._rules if r.action is action and not _is_caught(r))

    def status(self) -> GateStatus:
        """The gate at this moment."""
        now = binding.Status()
        self._library.hs_gate_status(ctypes.byref(now))
        return binding.gate_status(now)

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        """Block until there are events, :meth:`wake` was called or the time is over. Oldest first,
        maybe none. For one thread at a time. The GIL is given up while waiting."""
        if self._event_fd >= 0:
            poller = select.poll()
            poller.register(self._event_fd, select.POLLIN)
            poller.poll(None if timeout_s is None else max(0, round(timeout_s * 1000)))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._event_fd)
        return self._read_all()

    def wake(self) -> None:
        """Make a blocked :meth:`wait_events` return."""
        if self._event_fd >= 0:
            os.eventfd_write(self._event_fd, 1)

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Within it the calling thread is never held: for savers, drains and agreement. Nests."""
        before = self._library.hs_gate_exempt(1)
        try:
            yield
        finally:
            self._library.hs_gate_exempt(before)

    def check_handlers(self) -> int:
        """How many of our handlers were replaced by others; one HANDLER_REPLACED event each."""
        return int(self._library.hs_gate_check_handlers())

    def owner(self, signo: int) -> Owner:
        """Who owns the installed handler of this signal."""
        return OURS if self._library.hs_gate_owns(signo) else VIEW.owner(signo)

    def take_back(self, signo: int) -> None:
        """Put our handler back over the one that is there. A Python handler is called after it, as
        if it had been there before us; one of C code is not, for it may call ours in turn, without
        end.

        Raises:
            InstallError: the gate does not run in this process.
        """
        handler = VIEW.owner(signo).handler
        removed = handler in NOBODY
        chain = callable(handler) or (removed and not VIEW.keeps_before(signo))
        result = self._library.hs_gate_retake(signo, int(chain))
        _require(result, f"signal {signo} cannot be taken back")
        if removed:
            VIEW.add(rule for rule in self._rules if rule.signo == signo)

    def bound_launches(self, bound_s: float, *, device_type: int = 1) -> None:
        """Let training threads launch at most so much work, in seconds, beyond what their device
        has finished; 0 for no bound, which costs nothing.

        Args:
            device_type: a number of ``c10::DeviceType``; 1 is CUDA. It must be in use already.

        Raises:
            InstallError: torch has no such device here, or takes no callback.
        """
        result = self._library.hs_gate_bound_launches(device_type, round(bound_s * 1e9))
        _require(result, "launches are not bounded")

    def launches(self) -> binding.LaunchAhead:
        """What the bound has done since it was set."""
        seen = binding.LaunchAhead()
        self._library.hs_gate_launches(ctypes.byref(seen))
        return seen

    @contextlib.contextmanager
    def trace(self, keep: int, *, collectives: bool = False) -> Iterator[Trace]:
        """Count every operator of the process, or every collective, and write down the first
        ``keep``; hold nobody. What it yields is filled in when the block ends.

        Raises:
            GateError: another trace is on.
        """
        result = self._library.hs_gate_trace_start(keep, int(collectives))
        if result < 0:
            raise GateError(f"operators cannot be traced: {os.strerror(-result)}")
        trace = Trace()
        try:
            yield trace
        finally:
            kept = (binding.Traced * keep)()
            n = self._library.hs_gate_trace_stop(kept, keep)
            trace.count = self._library.hs_gate_trace_count()
            trace.operators = tuple(binding.operator(one) for one in kept[:n])

    def _check_sees_operators(self) -> None:
        """A self-test at every load: takes microseconds, and holds nobody."""
        import torch

        with self.trace(1) as trace:
            torch.empty(1).add_(1)
        if trace.count < 1:
            raise GateSelfTestFailed(
                f"the gate {self.path} does not see the operators of torch {torch.__version__}; "
                "was it built without record_function, or was that switched off by "
                "torch.autograd._enable_record_function(False)?"
            )

    def _read_all(self) -> list[GateEvent]:
        events: list[GateEvent] = []
        rows = (binding.Event * _READ_AT_ONCE)()
        while True:
            n = self._library.hs_gate_read(rows, _READ_AT_ONCE)
            events += [binding.gate_event(row) for row in rows[:n]]
            if n < _READ_AT_ONCE:
                return events

    def _close_event_fd(self) -> None:
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def __del__(self) -> None:
        if getattr(self, "_event_fd", -1) >= 0 and sys is not None and not sys.is_finalizing():
            # there is one gate per process: another object may run it by now, or run it in a child
            if self._started_by == os.getpid():
                self.stop()
            self._close_event_fd()


def _require(result: int, refusal: str) -> None:
    """Raise InstallError for the negative errno of a call of the gate's."""
    if result < 0:
        where = " (the gate was not started in this process)" if result == -errno.ESRCH else ""
        raise InstallError(f"{refusal}: {os.strerror(-result)}{where}")


def _is_caught(rule: SignalRule) -> bool:
    return address_of(rule.signo) not in NOBODY


def _load() -> tuple[Path, ctypes.CDLL]:
    """Find or build the library, and load it.

    A library that is intact and still cannot be loaded (built on another machine of a shared home)
    is built again, once.
    """
    with build.to_load() as found:
        try:
            return found.path, binding.bind(found.path)
        except GateError:
            if found.built_s is not None or found.origin != "cache":
                raise
        root, torch = found.path.parent.parent, compiler.installed_torch()
        again = build.build(root, environ=os.environ, torch=torch)
        return again.path, binding.bind(again.path)
