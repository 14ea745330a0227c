"""Signals for the module-hook gate, with what Python alone can do.

CPython calls a Python handler in the main thread, between two bytecodes, and several that wait are
called by number and not in the order in which they came: SIGCONT (18) before SIGTSTP (20), so that
a suspend and a resume within one long operator would leave the rank paused forever. The *wakeup
descriptor* has neither flaw: CPython's C handler writes the number of each signal into a pipe at
once, in order, in whatever thread received it. So the pipe is what counts, a watcher thread reads
it, and the Python handler only calls the one that it replaced. If somebody has installed another
wakeup descriptor (asyncio does), our handler writes the number itself: late, but it does.

What remains worse than native: no timestamp of the arrival, no sender, and no ``si_code``, so
Ctrl-Z is told from ``scontrol suspend`` by whether this process is in the foreground of a terminal.
The pipe holds 65,536 unread signals; more are lost. As everywhere in Unix, two different signals
sent within microseconds have no order of their own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from hydroslurm.errors import InstallError
from hydroslurm.gate.handlers import NOBODY, block_all_during, is_hydroslurms
from hydroslurm.gate.protocol import Handler, SignalOutcome, SignalRule

NUDGE = 0
"""The byte that is not a signal: check the requests and who is held."""


class SignalPipe:
    """A pipe through which the signals of a table arrive. One reader thread; starts once."""

    def __init__(self) -> None:
        self._replaced: dict[int, Handler] = {}
        # outlives restore(): a handler that replaced ours may still call it
        self._after: dict[int, Handler] = {}
        self._claimed: dict[int, Handler] = {}
        self._inside: set[int] = set()
        self.handler = self._on_signal  # one object, so that it can be recognised
        self._pid = os.getpid()
        self._read_fd, self._write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write_fd, False)
        self._previous_fd = -1
        self._listening = False

    def install(self, rules: Sequence[SignalRule]) -> dict[int, SignalOutcome]:
        """Install the handlers; with an empty table, from any thread.

        Raises:
            InstallError: not the main thread, or a handler that cannot be put back later. Nothing
                is left behind.
        """
        if not rules:
            return {}
        _require_main_thread(
            "take signals",
            "Install from the main thread, or get the native gate (install g++), or start without "
            "signals: requests from inside the process, pause() and resume(), work from any thread",
        )
        self._listening = True
        self._previous_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        try:
            outcomes = {rule.signo: self._install(rule) for rule in rules}
        except BaseException:
            self.restore()
            raise
        installed = [s for s, result in outcomes.items() if result is SignalOutcome.INSTALLED]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, installed)
        return outcomes

    def claim(self, rules: Sequence[SignalRule]) -> int:
        """Take over the signals of these rules, even from others' handlers; chain none of them.

        Raises:
            InstallError: not the main thread.
        """
        _require_main_thread("take signals over")
        listening = 0
        for rule in rules:
            if signal.getsignal(rule.signo) != self.handler:
                alone = replace(rule, only_if_handled=False, chain=False)
                if self._install(alone) is SignalOutcome.LEFT_ALONE:
                    continue
                self._listening = True
            self._claimed[rule.signo] = self._after.pop(rule.signo, None)
            listening += 1
        return listening

    def unclaim(self, rules: Sequence[SignalRule]) -> None:
        """Undo :meth:`claim`.

        Raises:
            InstallError: not the main thread.
        """
        _require_main_thread("give signals back")
        for rule in rules:
            after = self._claimed.pop(rule.signo, None)
            previous = self._replaced.get(rule.signo)
            if after is not None:
                self._after[rule.signo] = after
            elif rule.only_if_handled and previous is signal.SIG_DFL:
                if signal.getsignal(rule.signo) == self.handler:
                    signal.signal(rule.signo, previous)
                del self._replaced[rule.signo]

    def restore(self) -> int:
        """Put back what is still ours. Returns how many handlers somebody else had replaced.

        Raises:
            InstallError: not the main thread while handlers are installed; nothing was changed.
        """
        if not self._listening:
            return 0
        _require_main_thread("take its handlers out", "Call uninstall() there")
        with contextlib.suppress(OSError, ValueError):  # the old descriptor may be closed by now
            self._set_wakeup_fd_if_ours(self._previous_fd)
        replaced = len(self.replaced_by_others())
        for signo, previous in self._replaced.items():
            if signal.getsignal(signo) == self.handler:
                signal.signal(signo, previous)
        self._replaced, self._listening = {}, False
        return replaced

    def replaced_by_others(self) -> list[int]:
        """The signals whose installed handler is not ours any more."""
        return [signo for signo in self._replaced if signal.getsignal(signo) != self.handler]

    def take_back(self, signo: int) -> None:
        """Put our handler over the one that is there, which is called after it if it can be and the
        signal is not claimed. Main thread only."""
        now = signal.getsignal(signo)
        if signo not in self._replaced or now == self.handler:
            return
        if now not in NOBODY or not is_hydroslurms(self._replaced[signo]):
            self._replaced[signo] = now
            after = self._claimed if signo in self._claimed else self._after
            after[signo] = now
        signal.signal(signo, self.handler)
        block_all_during(signo)

    def nudge(self) -> None:
        """Make :meth:`read` return. Safe in a Python signal handler and in any thread."""
        self._write(NUDGE)

    def read(self, timeout_s: float | None) -> bytes:
        """What has arrived: signal numbers and :data:`NUDGE`, oldest first; empty when time is
        up."""
        watch = select.poll()  # select() cannot look at descriptors above 1023
        watch.register(self._read_fd, select.POLLIN)
        if not watch.poll(None if timeout_s is None else max(0.0, timeout_s * 1e3)):
            return b""
        arrived = os.read(self._read_fd, 512)
        if self._previous_fd >= 0:
            with contextlib.suppress(OSError):  # full, or closed by its owner
                os.write(self._previous_fd, arrived.replace(bytes([NUDGE]), b""))
        return arrived

    def close(self) -> None:
        """Close the pipe, once nothing reads it and no handler is ours."""
        os.close(self._read_fd)
        os.close(self._write_fd)
        self._read_fd = self._write_fd = -1

    def after_fork_in_child(self) -> None:
        """Cut the child off: its signals must not arrive in the parent's pipe."""
        self._set_wakeup_fd_if_ours(-1)

    def _install(self, rule: SignalRule) -> SignalOutcome:
        previous = signal.getsignal(rule.signo)
        if previous is signal.SIG_IGN and not rule.even_if_ignored:
            return SignalOutcome.LEFT_ALONE
        if not callable(previous) and _is_caught(rule.signo):
            raise InstallError(
                f"{signal.Signals(rule.signo).name} has a handler that was not installed from "
                "Python; the module-hook gate could neither call it nor put it back. Choose "
                "another signal (HYDROSLURM_SIGNALS), or get the native gate (install g++)"
            )
        if rule.only_if_handled and not callable(previous):
            return SignalOutcome.LEFT_ALONE
        if rule.chain:
            self._after[rule.signo] = previous
        try:
            signal.signal(rule.signo, self.handler)
        except (OSError, ValueError) as error:
            raise InstallError(f"cannot take signal {rule.signo}: {error}") from error
        block_all_during(rule.signo)
        self._replaced[rule.signo] = previous
        return SignalOutcome.INSTALLED

    def _on_signal(self, signo: int, frame: FrameType | None) -> None:
        if signo in self._inside:  # the handler that we call calls the one that it replaced
            return
        if os.getpid() == self._pid and not self._wakeup_fd_is_ours():
            self._write(signo)
        previous = self._after.get(signo)
        if callable(previous):
            self._inside.add(signo)
            try:
                previous(signo, frame)
            finally:
                self._inside.discard(signo)

    def _write(self, byte: int) -> None:
        # EAGAIN: the pipe is full, so that the reader will look anyway; EBADF: it is all over
        with contextlib.suppress(OSError):
            os.write(self._write_fd, bytes([byte]))

    def _wakeup_fd_is_ours(self) -> bool:
        """Main thread only. There is no way to ask but to set it."""
        current = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        if current not in (self._write_fd, -1):
            signal.set_wakeup_fd(current)
        return current == self._write_fd

    def _set_wakeup_fd_if_ours(self, new_fd: int) -> None:
        current = signal.set_wakeup_fd(new_fd)
        if current != self._write_fd:
            signal.set_wakeup_fd(current)


def _require_main_thread(
    what: str, instead: str = "Call from the main thread, or get the native gate (install g++)"
) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise InstallError(
            f"the module-hook gate can {what} in the main thread only (CPython's rule), and this "
            f"is {threading.current_thread().name!r}. {instead}"
        )


def runs(arrived: bytes) -> Iterator[tuple[int, int]]:
    """(byte, how often in a row), in order."""
    start = 0
    for index in range(1, len(arrived) + 1):
        if index == len(arrived) or arrived[index] != arrived[start]:
            yield arrived[start], index - start
            start = index


def _is_caught(signo: int) -> bool:
    """Whether the kernel knows a handler for the signal, Python's or not."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "- 0")
    return bool(int(caught.split()[1], 16) >> (signo - 1) & 1)
