"""Handlers that other code puts over ours while we are installed: noticed, reported in one line,
taken back.

- **Saved and restored** (Lightning does it with every signal): Python shows a handler that leads
  to ours (:mod:`hydroslurm.gate.handlers`); nothing is reported.
- **Set to the default action, or ignored** (asyncio's ``remove_signal_handler``): taken back.
- **Given to a library's handler**: taken back; that handler is called after ours, as if it had been
  there before us. Not if a ``Run`` has claimed the signal: the Run handles the stop.
- **Given to C code, past Python** (``faulthandler.register``): taken back, and that code is not
  called any more.
- **Given to a handler of the user's own script** (defined in ``__main__``): left alone, for that
  was on purpose; the line says what it means. Signals that end a pause are taken back even so: a
  parked main thread runs no Python handler, and the pause would never end.

Runs in the controller's thread, also while the main thread is held. So it takes no lock of another
thread: the lines go to stderr's descriptor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hydroslurm.core.signals import signal_name
from hydroslurm.errors import InstallError
from hydroslurm.gate.protocol import Action, Owner, OwnerKind, SignalRule
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
    """What became of a signal whose handler was replaced.

    Attributes:
        by: whose handler it was, in words.
        taken_back: the signal does again what hydroslurm promises.
        still_called: that handler is called as well.
    """

    signal: str
    by: str
    taken_back: bool
    still_called: bool


class Guard:
    """Decides what to do about a signal whose handler the gate has found replaced."""

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
        """Take a signal back or leave it alone, and report that.

        Args:
            claimed: stops were claimed, so that no other handler is called.

        Returns:
            The data of an event; None if there is nothing new to report.
        """
        rule, owner = self._rules[signo], self._gate.owner(signo)
        helps_only = rule.only_if_handled and not (claimed and rule.action is Action.STOP)
        if helps_only and owner.kind in (OwnerKind.DEFAULT, OwnerKind.IGNORED):
            return None  # nobody is left that the signal would have to reach
        found = self._judge(rule, owner, helps_only=helps_only)
        if found.taken_back:
            try:
                self._gate.take_back(signo)
            except InstallError:  # uninstalled a moment ago
                return None
        last = self._last.get(signo)
        if owner.kind is not OwnerKind.OURS and not helps_only:
            self._say(_message(found, rule, owner, self._names.get(signo, "")))
        elif last is None or (last.taken_back and not last.still_called):
            return None  # as far as anybody was told, it was ours all the time
        if last == found:
            return None
        self._last[signo] = found
        return found

    def _judge(self, rule: SignalRule, owner: Owner, *, helps_only: bool) -> Replaced:
        python = owner.kind is OwnerKind.PYTHON
        may_leave = rule.action is not Action.RESUME and not helps_only
        left = python and may_leave and _is_of_script(owner.handler)
        called = left or rule.action is not Action.STOP or helps_only
        return Replaced(
            signal=signal_name(rule.signo),
            by=_name(owner),
            taken_back=not left,
            still_called=python and called,
        )

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            with contextlib.suppress(OSError):
                os.write(2, f"hydroslurm: {text}\n".encode(errors="replace"))


def _message(found: Replaced, rule: SignalRule, owner: Owner, name: str) -> str:
    signal, does = found.signal, _DOES[rule.action]
    if not found.taken_back:
        return (
            f"{signal} now calls {found.by} of your script, which is left as it is: it no longer "
            f"{does}, unless your handler calls the one that signal.signal() returned. Handlers "
            "that are there before hydroslurm are called as well"
        )
    if owner.kind is OwnerKind.DEFAULT or owner.kind is OwnerKind.IGNORED:
        return (
            f"{signal} was given {found.by} by other code (asyncio's remove_signal_handler() does "
            "that, and whoever puts back what was there before hydroslurm). Taken back: it "
            f"{does} again. To leave it to others: {SIGNALS_ENV}={name}=none"
        )
    taken = f"{signal} was given to {found.by}. Taken back: it {does}"
    if found.still_called:
        both = f"{taken}, then that is called as well"
        if name.startswith("slurm_"):  # nobody can have Slurm send another one
            return both
        return f"{both}. To keep them apart, choose another signal: {SIGNALS_ENV}={name}=RTMIN+1"
    if owner.kind is OwnerKind.NATIVE:
        return (
            f"{taken}, and that is not called any more. Registered before hydroslurm is installed "
            "(faulthandler.register() is such code) it would be"
        )
    return f"{taken}, and that is not called: the Run answers for this signal"


def _name(owner: Owner) -> str:
    if owner.kind is OwnerKind.OURS:
        return "hydroslurm"
    if owner.kind is OwnerKind.DEFAULT:
        return "its default action"
    if owner.kind is OwnerKind.IGNORED:
        return "to nobody (it was ignored)"
    if owner.kind is OwnerKind.NATIVE:
        return f"C code in {owner.library or 'an unknown library'}"
    function = _function(owner.handler)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = getattr(function, "__module__", None) or "an unknown module"
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{name}() of {module}{where}" if module != "__main__" else f"{name}(){where}"


def _is_of_script(handler: object) -> bool:
    return getattr(_function(handler), "__module__", None) == "__main__"


def _function(handler: object) -> object:
    """What a partial or a bound method calls."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    return getattr(handler, "__func__", handler)
