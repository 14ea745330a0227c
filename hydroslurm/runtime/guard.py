"""Take signals back from code that replaces our handlers. Checked every two seconds; each case is
reported in one line.

A Python handler is then called after ours, as if it had been there before us, unless a ``Run`` has
claimed the signal and handles the stop itself. A handler in C (``faulthandler.register``) is not
called any more. Handlers that were only saved and restored, as Lightning does with every signal,
lead to ours anyway (:mod:`hydroslurm.gate.handlers`).

Runs in the controller's thread, also while the main thread is held. So it takes no lock of another
thread, and writes to stderr's descriptor.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydroslurm.core.signals import signal_name
from hydroslurm.errors import InstallError
from hydroslurm.gate.handlers import NOBODY, OURS
from hydroslurm.gate.protocol import Action
from hydroslurm.gate.signals import SIGNALS_ENV, SignalPlan

if TYPE_CHECKING:
    from hydroslurm.gate.native_gate import NativeGate

CHECK_S = 2.0
"""How often the installed handlers are compared with ours."""
_DOES = {
    Action.PAUSE: "pauses this process",
    Action.RESUME: "ends a pause of this process",
    Action.STOP: "has this process save and leave",
}


@dataclass(frozen=True)
class Replaced:
    """A signal whose handler was replaced, and taken back.

    Attributes:
        by: whose handler it was, in words.
        still_called: that handler is called as well.
    """

    signal: str
    by: str
    still_called: bool


class Guard:
    """Takes back the signals whose handlers the gate has found replaced."""

    def __init__(self, gate: NativeGate, plan: SignalPlan) -> None:
        self._gate = gate
        self._names = {v: k for k, v in vars(plan).items() if type(v) is int}
        self._rules = {rule.signo: rule for rule in plan.rules()}
        self._last: dict[int, Replaced] = {}
        self._said: set[str] = set()
        self._check_mono_s = time.monotonic() + CHECK_S

    def check(self) -> None:
        """Have the gate compare the handlers if that is due; it reports what it finds as events."""
        now_mono_s = time.monotonic()
        if now_mono_s >= self._check_mono_s:
            self._check_mono_s = now_mono_s + CHECK_S
            self._gate.check_handlers()

    def see(self, signo: int, *, claimed: bool) -> Replaced | None:
        """Take a signal back, and report that.

        Args:
            claimed: stops were claimed, so that no other handler is called.

        Returns:
            The data of an event; None if there is nothing new to report.
        """
        rule, owner = self._rules[signo], self._gate.owner(signo)
        helps_only = rule.only_if_handled and not (claimed and rule.action is Action.STOP)
        if helps_only and owner.handler in NOBODY:
            return None  # nobody is left that the signal would have to reach
        try:
            self._gate.take_back(signo)
        except InstallError:  # uninstalled a moment ago
            return None
        called = callable(owner.handler) and (rule.action is not Action.STOP or helps_only)
        found, last = Replaced(signal_name(signo), owner.name, called), self._last.get(signo)
        if owner is not OURS and not helps_only:
            self._say(found, owner.handler in NOBODY, _DOES[rule.action], self._names[signo])
        elif last is None or not last.still_called:
            return None  # as far as anybody was told, it was ours alone all the time
        if last == found:
            return None
        self._last[signo] = found
        return found

    def _say(self, found: Replaced, is_removed: bool, does: str, name: str) -> None:
        """One line, once."""
        given = found.by if is_removed else f"to {found.by}"
        then = "" if is_removed else ", and that is not called any more"
        if found.still_called:
            then = ", then that is called as well"
        text = (
            f"hydroslurm: {found.signal} was given {given} by other code. Taken back: it "
            f"{does}{then}. To leave it to others: {SIGNALS_ENV}={name}=none\n"
        )
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(OSError):
                os.write(2, text.encode(errors="replace"))
