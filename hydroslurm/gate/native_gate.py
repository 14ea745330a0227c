"""The native gate in Python: :class:`NativeGate`, on top of the binding."""

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
from hydroslurm.gate import binding
from hydroslurm.gate.handlers import NOBODY, OURS, VIEW, address_of
from hydroslurm.gate.library import installed_torch, to_load
from hydroslurm.gate.marks import Marks
from hydroslurm.gate.protocol import (
    Action,
    Cause,
    GateEvent,
    GateStatus,
    Operator,
    Owner,
    SignalOutcome,
    SignalRule,
    Trace,
)

_READ_AT_ONCE = 64


class NativeGate:
    """Can hold the rank at every operator of every training thread.

    A process has one gate, however many of these objects. Any thread may call the methods. The
    contract is that of ``native/gate.h``.
    """

    name = "native"
    granularity = (
        "every operator; one compiled region, or one replay of a CUDA graph, counts as one"
    )

    def __init__(self, library: Path | None = None) -> None:
        """Load the gate; build it if there is none for this torch yet (ten seconds, once).

        Raises:
            NoCompiler: it must be built, and there is no C++ compiler.
            GateSelfTestFailed: it does not see this torch's operators.
            GateError: it can be neither built nor loaded.
        """
        self.path, self._library = (library, binding.bind(library)) if library else _load()
        self.marks = Marks(self._library)
        self._event_fd = -1
        self._started_by = 0
        self._rules: tuple[SignalRule, ...] = ()
        self._check_sees_operators()

    def start(self, rules: Sequence[SignalRule]) -> dict[int, SignalOutcome]:
        """Start the watcher and install the handlers; on failure undo everything.

        Raises:
            AlreadyInstalled: it already runs in this process.
            InstallError: the table is invalid, or a handler could not be installed.
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

        Wakes a thread in :meth:`wait_events`; unread events stay readable.
        """
        self._started_by = 0
        replaced = int(self._library.hs_gate_stop())
        VIEW.hide()
        self.wake()
        return replaced

    def request(self, action: Action, causes: Cause) -> None:
        """Request a pause, resume or stop from inside the process. Returns at once.

        Raises:
            InstallError: the gate does not run in this process, or the request is invalid.
        """
        result = self._library.hs_gate_request(action, causes)
        _require(result, f"the gate refuses {action.name} for {causes.names()}")

    def let_through(self, n: int) -> None:
        """Let the training threads run on with the gate closed until they have issued ``n`` more
        collectives of torch.distributed. Returns at once.

        Each thread is then held before the first collective beyond that allowance; all its other
        operators pass. Calls add up; opening the gate cancels the allowance. With 0, or an open
        gate, this does nothing. A LET_THROUGH event reports when it is in force, a later PARKED
        that all threads are at rest.

        Raises:
            InstallError: the gate does not run in this process, or ``n`` is out of range.
        """
        # ctypes would truncate a larger number to its lowest bits
        result = self._library.hs_gate_let_through(n) if abs(n) < 1 << 63 else -errno.EINVAL
        _require(result, f"the gate lets no {n} collectives through")

    def hold_here(self) -> None:
        """Undo :meth:`let_through`: drop the rest of the allowance, and hold every thread at its
        next operator of any kind. Raises as it does. Returns at once."""
        _require(self._library.hs_gate_hold_here(), "the gate holds nobody")

    def claim(self, action: Action) -> int:
        """Handle every signal of the table with this action, including those left alone for lack of
        a handler, and do not chain: the caller is responsible for what follows. Replaces handlers
        installed over ours. Returns the number of handled signals.

        Raises:
            InstallError: the gate does not run in this process.
        """
        listening = self._library.hs_gate_claim(action, 1)
        _require(listening, f"the signals for {action.name} cannot be taken over")
        VIEW.add(rule for rule in self._rules if rule.action is action and _is_caught(rule))
        return int(listening)

    def unclaim(self, action: Action) -> None:
        """Undo :meth:`claim`: chain again, and restore earlier default dispositions."""
        result = self._library.hs_gate_claim(action, 0)
        _require(result, f"the signals for {action.name} cannot be given back")
        VIEW.hide(r for r in self._rules if r.action is action and not _is_caught(r))

    def status(self) -> GateStatus:
        """Return a snapshot of the gate."""
        row = binding.Status()
        self._library.hs_gate_status(ctypes.byref(row))
        return binding.value_of(GateStatus, row)

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        """Wait for events, :meth:`wake` or the timeout, without the GIL. Oldest first, maybe none.
        Only one thread at a time may call this."""
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
        """Never hold the calling thread within the block: for savers, drains, agreement. Nests."""
        before = self._library.hs_gate_exempt(1)
        try:
            yield
        finally:
            self._library.hs_gate_exempt(before)

    def check_handlers(self) -> int:
        """Count our handlers that others have replaced; each gives a HANDLER_REPLACED event."""
        return int(self._library.hs_gate_check_handlers())

    def owner(self, signo: int) -> Owner:
        """Return the owner of this signal's installed handler."""
        return OURS if self._library.hs_gate_owns(signo) else VIEW.owner(signo)

    def take_back(self, signo: int) -> None:
        """Install our handler again over the present one. It then calls a Python handler as if that
        had been there before us, but not one of C code, which may call ours in an endless loop.

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
        """Limit the work, in seconds, that training threads may launch beyond what their device has
        finished; 0 for no bound, which costs nothing.

        Args:
            device_type: a number of ``c10::DeviceType``; 1 is CUDA. The device must be in use.

        Raises:
            InstallError: torch has no such device here, or accepts no callback.
        """
        result = self._library.hs_gate_bound_launches(device_type, round(bound_s * 1e9))
        _require(result, "launches are not bounded")

    def launches(self) -> binding.LaunchAhead:
        """Return the effects of the bound since it was set."""
        counts = binding.LaunchAhead()
        self._library.hs_gate_launches(ctypes.byref(counts))
        return counts

    @contextlib.contextmanager
    def trace(self, keep: int, *, collectives: bool = False) -> Iterator[Trace]:
        """Count every operator, or every collective, of the process and record the first ``keep``;
        hold no thread. The yielded trace is filled when the block ends.

        Raises:
            GateError: another trace is running.
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
            trace.operators = tuple(binding.value_of(Operator, row) for row in kept[:n])

    def _check_sees_operators(self) -> None:
        """Check at every load that operators are seen; takes microseconds, holds no thread."""
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
            events += [binding.value_of(GateEvent, row) for row in rows[:n]]
            if n < _READ_AT_ONCE:
                return events

    def _close_event_fd(self) -> None:
        if self._event_fd >= 0:
            os.close(self._event_fd)
            self._event_fd = -1

    def __del__(self) -> None:
        if getattr(self, "_event_fd", -1) >= 0 and sys is not None and not sys.is_finalizing():
            # another object may run the process's gate by now, or run it in a child
            if self._started_by == os.getpid():
                self.stop()
            self._close_event_fd()


def _require(result: int, refusal: str) -> None:
    """Raise InstallError for the negative errno that the gate returned."""
    if result < 0:
        where = " (the gate was not started in this process)" if result == -errno.ESRCH else ""
        raise InstallError(f"{refusal}: {os.strerror(-result)}{where}")


def _is_caught(rule: SignalRule) -> bool:
    return address_of(rule.signo) not in NOBODY


def _load() -> tuple[Path, ctypes.CDLL]:
    """Find or build the library, and load it.

    Builds once more if the library is intact but cannot be loaded (built on another machine of a
    shared home).
    """
    with to_load() as library:
        try:
            return library.path, binding.bind(library.path)
        except GateError:
            if library.built_s is not None or library.origin != "cache":
                raise
        from hydroslurm.gate.build import build

        rebuilt = build(library.path.parent.parent, environ=os.environ, torch=installed_torch())
        return rebuilt.path, binding.bind(rebuilt.path)
