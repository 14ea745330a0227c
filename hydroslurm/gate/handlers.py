"""Ownership of signal handlers, and what Python shows of those we install in the kernel.

For Python a handler installed by ``sigaction`` alone does not exist: ``signal.getsignal`` returns
SIG_DFL. Libraries take signals that look free, and those that save and restore all handlers
(Lightning does, around each ``fit``) would silently remove ours. So Python shows a
:class:`ShownHandler`, while the kernel keeps the native one, which runs at once. Python's runs only
if other code calls it, or has restored it, which replaces ours with CPython's C handler until the
next check. Without the native gate (:meth:`PythonView.take`) they are plain Python handlers.

One is never shown: ours for SIGINT while Python has ``default_int_handler`` there. asyncio looks
for exactly that, and would otherwise not cancel its tasks at Ctrl-C.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hydroslurm.core.proc import stat_of
from hydroslurm.core.signals import signal_name
from hydroslurm.errors import InstallError
from hydroslurm.gate.protocol import Action, Handler, Owner, SignalOutcome, SignalRule
from hydroslurm.gate.signals import SIGNALS_ENV, SignalPlan

if TYPE_CHECKING:
    from hydroslurm.gate.native_gate import NativeGate

NOBODY = (signal.SIG_DFL, signal.SIG_IGN)
OURS = Owner("hydroslurm")


def is_hydroslurms(handler: Handler) -> bool:
    """Whether hydroslurm installed this handler earlier (``autoload.keep_alive``)."""
    return str(getattr(handler, "__module__", None)).startswith("hydroslurm.")


class ShownHandler:
    """``signal.getsignal`` of a signal that is ours. Delivers a signal that did not reach the
    native handler, then calls the previous handler if we chain.

    Attributes:
        before: what Python showed before us, and shows again after.
    """

    def __init__(self, rule: SignalRule, before: Handler, deliver: Callable[[int], int]) -> None:
        self.rule = rule
        self.before = before
        self._deliver = deliver
        self._pid = os.getpid()

    def __call__(self, signo: int, frame: FrameType | None) -> None:
        calls_before = self._deliver(self.rule.signo)
        if calls_before < 0:
            self._call_without_us(signo, frame)
        elif calls_before and callable(self.before):
            self.before(signo, frame)

    def __repr__(self) -> str:
        return f"<hydroslurm's handler of {signal.Signals(self.rule.signo).name}>"

    def _call_without_us(self, signo: int, frame: FrameType | None) -> None:
        """Act as the process would without us, after removal or in a forked child; but no process
        dies of a signal meant to pause or resume."""
        of_pauses = self.rule.action is not Action.STOP and not self.rule.only_if_handled
        if of_pauses and os.getpid() != self._pid:
            return
        if callable(self.before):
            self.before(signo, frame)
        elif self.before is signal.SIG_DFL and not of_pauses:
            signal.signal(signo, signal.SIG_DFL)
            signal.raise_signal(signo)


class PythonView:
    """Keeps what Python shows consistent with the gate's handlers. One per process.

    Python allows changes in the main thread only, so requests of other threads run there, soon.
    """

    def __init__(self) -> None:
        self._wanted: dict[int, SignalRule] = {}
        self._shown: dict[int, ShownHandler] = {}
        self._deliver: Callable[[int], int] | None = None
        self._is_plain = False
        self._cpython = 0

    def show(self, rules: Iterable[SignalRule], deliver: Callable[[int], int]) -> None:
        """Show ours for these signals from now on. ``deliver``: ``hs_gate_deliver()``."""
        self._deliver, self._is_plain = deliver, False
        self._wanted = {rule.signo: rule for rule in rules}
        in_main_thread(self._sync)

    def take(
        self, rules: Iterable[SignalRule], deliver: Callable[[int], int]
    ) -> dict[int, SignalOutcome]:
        """Install ours as plain Python handlers: there are no native ones.

        Raises:
            InstallError: not the main thread, or a signal that cannot be taken; nothing was
                installed.
        """
        outcomes = {rule.signo: _outcome(rule) for rule in rules}
        wanted = {r.signo: r for r in rules if outcomes[r.signo] is SignalOutcome.INSTALLED}
        if wanted and threading.current_thread() is not threading.main_thread():
            raise InstallError(
                "without the native gate signals are taken in the main thread only; install there. "
                "pause() and resume() work from any"
            )
        self._deliver, self._is_plain, self._wanted = deliver, True, wanted
        self._sync()
        return outcomes

    def shows(self, signo: int) -> bool:
        """Whether Python shows ours for this signal."""
        return isinstance(signal.getsignal(signo), ShownHandler)

    def add(self, rules: Iterable[SignalRule]) -> None:
        """Show ours for these as well, also where Python shows none."""
        self._wanted.update({rule.signo: rule for rule in rules})
        in_main_thread(self._sync)

    def hide(self, rules: Iterable[SignalRule] | None = None) -> None:
        """Show the earlier handlers again; ``rules``: only for these."""
        gone = self._wanted if rules is None else {rule.signo for rule in rules}
        self._wanted = {s: rule for s, rule in self._wanted.items() if s not in gone}
        in_main_thread(self._sync)

    def owner(self, signo: int) -> Owner:
        """Return the owner of the handler installed in place of the native one."""
        address = address_of(signo)
        shown = signal.getsignal(signo)
        own = self._shown.get(signo)
        if address == signal.SIG_DFL:
            return Owner("its default action", signal.SIG_DFL)
        if address == signal.SIG_IGN:
            return Owner("to nobody (it was ignored)", signal.SIG_IGN)
        if not callable(shown) or (self._cpython and address != self._cpython):
            return Owner(f"C code in {library_of(address) or 'an unknown library'}")
        if isinstance(shown, ShownHandler) or (own is not None and shown is own.before):
            return OURS
        return Owner(name_of(shown), shown)

    def keeps_before(self, signo: int) -> bool:
        """Whether the handler before us comes back even if it was removed since."""
        own = self._shown.get(signo)
        return own is not None and is_hydroslurms(own.before)

    def _sync(self) -> None:
        for signo, rule in list(self._wanted.items()):
            with contextlib.suppress(OSError, ValueError):
                self._show(signo, rule)
        for signo in self._shown.keys() - self._wanted.keys():
            own = self._shown.pop(signo)
            before = own.before
            if signal.getsignal(signo) is own:
                self._set(signo, before)

    def _show(self, signo: int, rule: SignalRule) -> None:
        now = signal.getsignal(signo)
        if now is None or (now is signal.default_int_handler and not self._is_plain):
            return
        own = self._shown.get(signo)
        if own is not None and not self._is_plain:
            if now not in NOBODY:  # ours, or one that is called after ours
                return
            if not self.keeps_before(signo):
                own.before = now
        elif isinstance(now, ShownHandler):  # saved during an earlier installation, restored since
            now.rule, self._shown[signo] = rule, now
            return
        else:
            own = self._shown[signo] = ShownHandler(rule, now, self._deliver_if_shown)
        self._set(signo, own)

    def _set(self, signo: int, handler: Handler) -> None:
        with contextlib.nullcontext() if self._is_plain else kernel_kept(signo):
            signal.signal(signo, handler)
            self._cpython = address_of(signo)
        if self._is_plain:  # it may be blocked since before Python
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signo})

    def _deliver_if_shown(self, signo: int) -> int:
        return self._deliver(signo) if self._deliver is not None else -1


def _outcome(rule: SignalRule) -> SignalOutcome:
    """Whether this rule gets a plain handler."""
    before = signal.getsignal(rule.signo)
    if not callable(before) and address_of(rule.signo) not in NOBODY:
        raise InstallError(
            f"{signal_name(rule.signo)} has a handler of C code, which Python can neither call nor "
            f"put back. Choose another signal ({SIGNALS_ENV})"
        )
    ignored = before is signal.SIG_IGN and not rule.even_if_ignored
    unhandled = rule.only_if_handled and not callable(before)
    suspends = rule.signo == signal.SIGTSTP and rule.action is Action.PAUSE
    has_terminal = suspends and stat_of("self")[4] != "0"  # then Ctrl-Z must still stop the process
    left_alone = ignored or unhandled or has_terminal
    return SignalOutcome.LEFT_ALONE if left_alone else SignalOutcome.INSTALLED


VIEW = PythonView()
"""The view of this process."""


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
    """Takes signals back from code that replaces our handlers, and reports each case in one line.

    A Python handler is then called after ours, as if it had been there before us, unless a ``Run``
    has claimed the signal and handles the stop itself. A handler in C (``faulthandler.register``)
    is not called any more. Handlers that were only saved and restored lead to ours anyway.

    Runs in the controller's thread, also while the main thread is held. So it takes no lock of
    another thread, and writes to stderr's descriptor.
    """

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


def name_of(handler: object) -> str:
    """Return a Python handler's name and place: ``save() of trainer (trainer.py:41)``."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    function = getattr(handler, "__func__", handler)
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = getattr(function, "__module__", None) or "an unknown module"
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"{name}(){where}" if module == "__main__" else f"{name}() of {module}{where}"


def in_main_thread(act: Callable[[], None]) -> None:
    """Call it now in the main thread; from another one, at the main thread's next bytecode."""
    if threading.current_thread() is threading.main_thread():
        act()
        return
    _due.put(act)
    ctypes.pythonapi.Py_AddPendingCall(_ACT_ON_DUE, None)  # if full: one pending call acts on all


_due: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()


def _act_on_due(_: object) -> int:
    with contextlib.suppress(queue.Empty):
        while True:
            _due.get_nowait()()
    return 0


_ACT_ON_DUE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_act_on_due)


# --- access to the kernel's table past CPython

# The layout (handler, 128 bytes of mask, the rest) is glibc's and musl's on every 64-bit Linux.

_libc = ctypes.CDLL(None, use_errno=True)


def _read(signo: int) -> ctypes.Array[ctypes.c_char] | None:
    action = ctypes.create_string_buffer(256)
    return action if _libc.sigaction(signo, None, action) == 0 else None


def address_of(signo: int) -> int:
    """Return the installed handler's address; 0 for the default action, 1 if ignored."""
    action = _read(signo)
    return 0 if action is None else (ctypes.c_void_p.from_buffer(action).value or 0)


@contextlib.contextmanager
def kernel_kept(signo: int) -> Iterator[None]:
    """Let CPython install within the block; then restore what the kernel had."""
    action = _read(signo)
    try:
        yield
    finally:
        if action is not None:
            _libc.sigaction(signo, action, None)


def library_of(address: int) -> str:
    """Return the file whose code is at this address; empty if unknown."""
    for line in Path("/proc/self/maps").read_text(errors="replace").splitlines():
        place, _, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(part, 16) for part in place.split("-"))
        if begin <= address < end:
            return Path(*path).name
    return ""
