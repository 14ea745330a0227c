"""Plain Python handlers for the signals of a table: for a gate without native code.

CPython calls them between two bytecodes of the main thread, the only one that may install them.
Those that wait are called by number.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import FrameType

from hydroslurm.core.signals import signal_name
from hydroslurm.errors import InstallError
from hydroslurm.gate.handlers import NOBODY, address_of
from hydroslurm.gate.protocol import Action, Cause, Handler, SignalOutcome, SignalRule

_SAME_OPERATOR_NS = 1_000_000
"""Handlers that waited for one operator are called within this time."""


class PythonHandlers:
    """The handlers of one table. To be used in the main thread."""

    def __init__(self, heard: Callable[[Action, Cause, int], None]) -> None:
        """``heard``: called in a handler, with what the signal means and its number."""
        self._heard = heard
        self._rules: dict[int, SignalRule] = {}
        self._before: dict[int, Handler] = {}  # of the signals that are ours
        self._claimed: set[Action] = set()
        self._inside: set[int] = set()
        self._pid = self._continued_ns = 0

    def install(self, rules: Iterable[SignalRule]) -> dict[int, SignalOutcome]:
        """Take the signals of these rules; on failure leave nothing behind.

        Raises:
            InstallError: not the main thread, or a handler that cannot be put back later.
        """
        self._pid, self._before = os.getpid(), {}
        self._rules = {rule.signo: rule for rule in rules}
        try:
            return {signo: self._take(rule) for signo, rule in self._rules.items()}
        except InstallError:
            self.restore()
            raise

    def restore(self) -> int:
        """Put back what is still ours. Returns how many handlers others had replaced."""
        replaced = self.count_replaced()
        for signo in self._rules:
            self._give_back(signo)
        self._rules = {}  # what was there before is kept: others may still call ours
        return replaced

    def claim(self, action: Action) -> int:
        """Take all signals of an action, and call no other handler; returns how many are ours."""
        self._claimed.add(action)
        rules = [rule for rule in self._rules.values() if rule.action is action]
        for rule in rules:
            if signal.getsignal(rule.signo) != self._on_signal:
                self._take(replace(rule, only_if_handled=False))
        return sum(signal.getsignal(rule.signo) == self._on_signal for rule in rules)

    def unclaim(self, action: Action) -> None:
        """Undo :meth:`claim`."""
        self._claimed.discard(action)
        for signo, rule in self._rules.items():
            only_claimed = rule.only_if_handled and self._before.get(signo) is signal.SIG_DFL
            if rule.action is action and only_claimed:
                self._give_back(signo)
                del self._before[signo]

    def count_replaced(self) -> int:
        """How many of our handlers were replaced by others."""
        ours = [signo for signo in self._rules if signo in self._before]
        return sum(signal.getsignal(signo) != self._on_signal for signo in ours)

    def _take(self, rule: SignalRule) -> SignalOutcome:
        before = signal.getsignal(rule.signo)
        unhandled = rule.only_if_handled and not callable(before)
        if (before is signal.SIG_IGN and not rule.even_if_ignored) or unhandled:
            return SignalOutcome.LEFT_ALONE
        if rule.signo == signal.SIGTSTP and rule.action is Action.PAUSE and _has_terminal():
            return SignalOutcome.LEFT_ALONE  # Ctrl-Z has to stop the process, as ever
        if not callable(before) and address_of(rule.signo) not in NOBODY:
            raise InstallError(
                f"{signal_name(rule.signo)} has a handler of C code, which Python can neither call "
                "nor put back. Choose another signal (HYDROSLURM_SIGNALS)"
            )
        try:
            signal.signal(rule.signo, self._on_signal)
        except (OSError, ValueError) as error:
            raise InstallError(
                f"cannot take signal {rule.signo}: {error}. Without the native gate signals are "
                "taken in the main thread only; pause() and resume() work from any"
            ) from error
        self._before[rule.signo] = before
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {rule.signo})
        return SignalOutcome.INSTALLED

    def _give_back(self, signo: int) -> None:
        if signo in self._before and signal.getsignal(signo) == self._on_signal:
            try:
                signal.signal(signo, self._before[signo])
            except ValueError as error:
                raise InstallError(f"cannot give signal {signo} back: {error}") from error

    def _on_signal(self, signo: int, frame: FrameType | None) -> None:
        rule = self._rules.get(signo)
        if signo in self._inside:  # the handler that we call calls the one that it replaced
            return
        if rule is not None and os.getpid() == self._pid and not self._is_over(signo):
            self._heard(rule.action, rule.causes, signo)
        before = self._before.get(signo)
        if callable(before) and not (rule and rule.action in self._claimed):
            self._inside.add(signo)
            try:
                before(signo, frame)
            finally:
                self._inside.discard(signo)

    def _is_over(self, signo: int) -> bool:
        """Whether it is a suspend that ended within one long operator: then SIGCONT's handler (18)
        is called first, and SIGTSTP's (20) right after it."""
        now_ns = time.monotonic_ns()
        if signo == signal.SIGCONT:
            self._continued_ns = now_ns
        return signo == signal.SIGTSTP and now_ns - self._continued_ns < _SAME_OPERATOR_NS


def _has_terminal() -> bool:
    """Whether Ctrl-Z may come from a terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
