"""What a gate is: the values that pass between it and the controller.

There are two gates: :mod:`hydroslurm.gate.native_gate` (every operator, armed only while a pause is
wanted) and :mod:`hydroslurm.gate.hooks` (module boundaries, for machines without a compiler).
Numbers are those of ``native/gate.h``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag, auto
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from hydroslurm.core.events import EventKind

if TYPE_CHECKING:
    from hydroslurm.gate.marks import Marks


class Action(IntEnum):
    """What a signal or a request asks for."""

    PAUSE = 1
    RESUME = 2
    STOP = 3


class Cause(IntFlag):
    """Why the gate is closed. A rank runs only while the set is empty."""

    SLURM = 1
    USER = 2
    API = 4
    TERMINAL = 8
    PEERS = 16
    """Another rank of the job is paused. Only requests set it."""
    VACATED = 32
    """Device memory is away. Only requests set it, while the gate is closed; it keeps the gate
    closed even when a stop comes, for the next operator would read what is not there."""

    def names(self) -> list[str]:
        """The causes in the set, lower case, in order of their number."""
        return [(cause.name or "").lower() for cause in Cause if cause in self]


NO_CAUSE = Cause(0)


class Phase(IntEnum):
    """Which part of autograd an operator was met in."""

    FORWARD = 0
    BACKWARD = 1


class GateState(IntEnum):
    """Where the rank is between running and parked."""

    RUNNING = 0
    PARKING = 1
    PARKED = 2
    STOPPING = 3


GATE_EVENT_KINDS = (
    EventKind.SIGNAL_RECEIVED,
    EventKind.GATE_CLOSED,
    EventKind.FIRST_OPERATOR_HELD,
    EventKind.PARKED,
    EventKind.RESUMED,
    EventKind.FIRST_OPERATOR_RELEASED,
    EventKind.LATE_OPERATOR_HELD,
    EventKind.CAUSES_CHANGED,
    EventKind.STOP_REQUESTED,
    EventKind.TERMINAL_STOP,
    EventKind.TERMINAL_STOP_IGNORED,
    EventKind.CALLBACK_LOST,
    EventKind.HANDLER_REPLACED,
    EventKind.EVENTS_DROPPED,
    EventKind.LET_THROUGH,
)
"""What a gate reports, in the order of ``enum hs_event_kind`` in ``native/gate.h``, whose numbers
start at 1. That header says which fields each kind fills."""


class SignalOutcome(IntEnum):
    """What became of one rule of the signal table."""

    INSTALLED = 0
    LEFT_ALONE = 1
    """The signal was ignored before us (nohup), or had no handler and the rule asks for one."""


@dataclass(frozen=True)
class SignalRule:
    """One line of the signal table: what one signal means.

    Attributes:
        signo: the signal's number.
        action: what it asks for.
        causes: added by PAUSE, removed by RESUME, unused by STOP.
        even_if_ignored: install although the process was started with the signal ignored.
        chain: call the previous handler as well.
        only_if_handled: leave the default disposition alone.
    """

    signo: int
    action: Action
    causes: Cause = NO_CAUSE
    even_if_ignored: bool = False
    chain: bool = True
    only_if_handled: bool = False


Handler = Callable[[int, FrameType | None], Any] | int | None
"""As ``signal.getsignal`` shows them."""


class OwnerKind(Enum):
    """Who owns a handler that is installed in place of the gate's."""

    OURS = auto()
    """The gate's own, but only as Python knows it: somebody saved and restored it."""
    DEFAULT = auto()
    IGNORED = auto()
    PYTHON = auto()
    NATIVE = auto()
    """Installed by C code, past Python."""


@dataclass(frozen=True)
class Owner:
    """Who has a signal.

    Attributes:
        handler: of PYTHON, the callable.
        library: of NATIVE, the name of the file that its code is in; empty: not known.
    """

    kind: OwnerKind
    handler: Handler = None
    library: str = ""


@dataclass(frozen=True)
class GateEvent:
    """Something that a gate saw. Times are nanoseconds; 0 where the kind does not fill a field."""

    kind: EventKind
    mono_ns: int
    epoch_ns: int
    signo: int = 0
    value_ns: int = 0
    causes: Cause = NO_CAUSE
    sender_pid: int = 0
    tid: int = 0
    phase: Phase = Phase.FORWARD
    held: int = 0
    quiet: int = 0
    count: int = 0
    passed: int = 0
    text: str = ""


@dataclass(frozen=True)
class GateStatus:
    """The gate at one moment; see ``struct hs_status``."""

    state: GateState
    causes: Cause
    held: int
    quiet: int
    armed: bool
    capturing: int
    passed: int
    closes: int
    closed_mono_ns: int
    window_open: bool = False
    allowance: int = 0
    let_through: int = 0


@dataclass(frozen=True)
class Operator:
    """One operator seen by a trace."""

    name: str
    phase: Phase
    tid: int
    mono_ns: int


@dataclass
class Trace:
    """What passed the gate while a trace was on; filled when the trace ends."""

    count: int = 0
    operators: Sequence[Operator] = ()


class Gate(Protocol):
    """Holds the training threads of this process at their next operator.

    All methods may be called from any thread, except where an implementation says otherwise.
    """

    @property
    def name(self) -> str:
        """``native`` or ``hooks``."""
        ...

    @property
    def granularity(self) -> str:
        """In words, where a rank can be held: for people who read reports."""
        ...

    def start(self, rules: Sequence[SignalRule]) -> dict[int, SignalOutcome]:
        """Start the watcher, install the handlers; on failure leave nothing behind.

        Raises:
            AlreadyInstalled: it runs in this process.
            InstallError: a handler could not be installed.
        """
        ...

    def stop(self) -> int:
        """Open, disarm, end the watcher, restore. Returns how many handlers somebody else had
        replaced."""
        ...

    def request(self, action: Action, causes: Cause) -> None:
        """Ask for a pause, a resume or a stop from inside the process. Returns at once."""
        ...

    @property
    def stops_at_collectives(self) -> bool:
        """Can :meth:`let_through` be used: does the gate see collectives before they are issued?"""
        ...

    def let_through(self, n: int) -> None:
        """Let the training threads run, while the gate stays closed, until ``n`` more collectives
        of torch.distributed have been issued. Returns at once.

        Each thread is then held before the first collective beyond that allowance; all its other
        operators pass. Further calls add to the allowance, which is lost when the gate opens. With
        0, or an open gate, nothing happens. A LET_THROUGH event says when it is in force, and a
        PARKED after it that all threads have come to rest.

        Raises:
            InstallError: the gate does not run here, cannot see collectives, or ``n`` is negative.
        """
        ...

    def hold_here(self) -> None:
        """Undo :meth:`let_through`: what is left of the allowance is lost, and every thread that is
        not held is held at its next operator of any kind. Returns at once.

        Raises:
            InstallError: the gate does not run here.
        """
        ...

    def claim(self, action: Action) -> int:
        """Handle every signal of the table that has this action, including those that were left
        alone because nobody handled them, and call no old handler: the caller is responsible for
        what follows. A handler that somebody put over ours since is replaced. Returns how many
        signals are handled."""
        ...

    def unclaim(self, action: Action) -> None:
        """Undo :meth:`claim`: chain again, and restore the default where it was before."""
        ...

    def status(self) -> GateStatus: ...

    def wait_events(self, timeout_s: float | None) -> list[GateEvent]:
        """Block until there are events, :meth:`wake` was called or the time is over; oldest first,
        maybe none.

        For one thread only, the controller's. The GIL is given up while waiting.
        """
        ...

    def wake(self) -> None:
        """Make a blocked :meth:`wait_events` return."""
        ...

    def exempt(self) -> AbstractContextManager[None]:
        """Within it the calling thread is never held: for savers, drains and agreement."""
        ...

    def check_handlers(self) -> int:
        """How many of our handlers were replaced by others; one HANDLER_REPLACED event each."""
        ...

    def owner(self, signo: int) -> Owner:
        """Who owns the installed handler of this signal."""
        ...

    @property
    def hears_beside_others(self) -> bool:
        """Does the gate see signals whose handler belongs to somebody else?"""
        ...

    def take_back(self, signo: int) -> None:
        """Put our handler back over the one that is there. A Python handler is called after it, as
        if it had been there before us; one of C code is not, for it may call ours in turn, without
        end."""
        ...

    @property
    def marks(self) -> Marks:
        """The NVTX marks of this process; a gate without a library emits none."""
        ...

    def trace(self, keep: int) -> AbstractContextManager[Trace]:
        """Within it nothing is held, every operator is counted and the first ``keep`` are written
        down."""
        ...
