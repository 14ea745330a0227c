"""Plain Python handlers for a signal table: for a gate without native code.

CPython calls them between two bytecodes of the main thread, the only one that may install them.
It calls pending handlers in order of their number.
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
"""CPython calls the handlers that waited for one operator within this time."""


class PythonHandlers:
    """The handlers of one table; use it in the main thread."""

    def __init__(self, notify: Callable[[Action, Cause, int], None]) -> None:
        """``notify``: called in a handler, with the signal's action, causes and number."""
        self._notify = notify
        self._rules: dict[int, SignalRule] = {}
        self._before: dict[int, Handler] = {}  # handlers that ours replaced
        self._claimed: set[Action] = set()
        self._inside: set[int] = set()
        self._pid = self._continued_ns = 0

    def install(self, rules: Iterable[SignalRule]) -> dict[int, SignalOutcome]:
        """Install handlers for these rules; on failure restore all.

        Raises:
            InstallError: not the main thread, or a handler that could not be restored later.
        """
        self._pid, self._before = os.getpid(), {}
        self._rules = {rule.signo: rule for rule in rules}
        try:
            return {signo: self._take(rule) for signo, rule in self._rules.items()}
        except InstallError:
            self.restore()
            raise

    def restore(self) -> int:
        """Restore the handlers that are still ours. Returns how many others had replaced."""
        replaced = self.count_replaced()
        for signo in self._rules:
            self._give_back(signo)
        self._rules = {}  # keep the earlier handlers: other code may still call ours
        return replaced

    def claim(self, action: Action) -> int:
        """Handle all signals of an action, without chaining; return how many we handle."""
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
        """Return how many of our handlers others have replaced."""
        ours = [signo for signo in self._rules if signo in self._before]
        return sum(signal.getsignal(signo) != self._on_signal for signo in ours)

    def _take(self, rule: SignalRule) -> SignalOutcome:
        before = signal.getsignal(rule.signo)
        unhandled = rule.only_if_handled and not callable(before)
        if (before is signal.SIG_IGN and not rule.even_if_ignored) or unhandled:
            return SignalOutcome.LEFT_ALONE
        if rule.signo == signal.SIGTSTP and rule.action is Action.PAUSE and _has_terminal():
            return SignalOutcome.LEFT_ALONE  # Ctrl-Z must still stop the process
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
        if signo in self._inside:  # the handler we call calls the one it replaced
            return
        if rule is not None and os.getpid() == self._pid and not self._is_over(signo):
            self._notify(rule.action, rule.causes, signo)
        before = self._before.get(signo)
        if callable(before) and not (rule and rule.action in self._claimed):
            self._inside.add(signo)
            try:
                before(signo, frame)
            finally:
                self._inside.discard(signo)

    def _is_over(self, signo: int) -> bool:
        """Whether this suspend ended within one long operator: then CPython calls SIGCONT's handler
        (18) first, and SIGTSTP's (20) right after."""
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
