"""What passes between a gate and the controller. Numbers are those of ``native/gate.h``."""

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
        only_if_handled: leave the default disposition alone.
    """

    signo: int
    action: Action
    causes: Cause = NO_CAUSE
    even_if_ignored: bool = False
    only_if_handled: bool = False


Handler = Callable[[int, FrameType | None], Any] | int | None
"""As ``signal.getsignal`` shows them."""


@dataclass(frozen=True)
class Owner:
    """Whose handler is installed in place of the gate's.

    Attributes:
        name: in words; ``hydroslurm`` for the gate's own, which somebody has saved and restored.
        handler: somebody else's, as Python shows it; None for ours, and for that of C code.
    """

    name: str
    handler: Handler = None


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
