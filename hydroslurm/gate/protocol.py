"""Types between a gate and the controller. Numbers are those of ``native/gate.h``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import FrameType
from typing import Any

from hydroslurm.core.events import EventKind


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
    """Device memory is on the host. Set by requests only, while the gate is closed. It keeps the
    gate closed even for a stop, since the next operator would read missing memory."""

    def names(self) -> list[str]:
        """Return the causes in the set, lower case, in order of their number."""
        return [(cause.name or "").lower() for cause in Cause if cause in self]


NO_CAUSE = Cause(0)


class Phase(IntEnum):
    """The part of autograd in which an operator was met."""

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
"""Events of a gate, in the order of ``enum hs_event_kind`` in ``native/gate.h``, whose numbers
start at 1. That header says which fields each kind fills."""


class SignalOutcome(IntEnum):
    """Result of one rule of the signal table."""

    INSTALLED = 0
    LEFT_ALONE = 1
    """The signal was ignored before us (nohup), or the rule needs an earlier handler."""


@dataclass(frozen=True)
class SignalRule:
    """One line of the signal table.

    Attributes:
        signo: the signal's number.
        action: what the signal requests.
        causes: added by PAUSE, removed by RESUME, unused by STOP.
        even_if_ignored: install even if the process was started with the signal ignored.
        only_if_handled: leave a default disposition as it is.
    """

    signo: int
    action: Action
    causes: Cause = NO_CAUSE
    even_if_ignored: bool = False
    only_if_handled: bool = False


Handler = Callable[[int, FrameType | None], Any] | int | None
"""A handler as ``signal.getsignal`` returns it."""


@dataclass(frozen=True)
class Owner:
    """Owner of a handler that replaced the gate's.

    Attributes:
        name: in words; ``hydroslurm`` for the gate's own, saved and restored by other code.
        handler: as Python shows it; None for ours, and for C code.
    """

    name: str
    handler: Handler = None


@dataclass(frozen=True)
class GateEvent:
    """An event of a gate. Times are nanoseconds; fields that the kind does not fill are 0."""

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
    """A snapshot of the gate; see ``struct hs_status``."""

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
    """Operators that passed during a trace; filled when the trace ends."""

    count: int = 0
    operators: Sequence[Operator] = ()
