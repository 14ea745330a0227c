"""Types between a gate and the controller. Numbers are those of ``native/gate.h``.

A class whose fields have C types is a structure of that header: the fields are in its order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from types import FrameType
from typing import Annotated, Any

from hydroslurm.core.events import EventKind

TEXT_BYTES = 64
_Chars = ctypes.c_char * TEXT_BYTES

Int32 = Annotated[int, ctypes.c_int32]
Int64 = Annotated[int, ctypes.c_int64]
Text = Annotated[str, _Chars]
Flag = Annotated[bool, ctypes.c_int32]


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


@dataclass(frozen=True, kw_only=True)
class GateEvent:
    """An event of a gate (``struct hs_event``). Times are nanoseconds; fields that the kind does
    not fill are 0."""

    kind: Annotated[EventKind, ctypes.c_int32]
    signo: Int32 = 0
    mono_ns: Int64
    epoch_ns: Int64
    value_ns: Int64 = 0
    causes: Annotated[Cause, ctypes.c_uint32] = NO_CAUSE
    sender_pid: Int32 = 0
    tid: Int32 = 0
    phase: Annotated[Phase, ctypes.c_int32] = Phase.FORWARD
    held: Int32 = 0
    quiet: Int32 = 0
    count: Int64 = 0
    passed: Int64 = 0
    text: Text = ""


@dataclass(frozen=True, kw_only=True)
class GateStatus:
    """A snapshot of the gate; see ``struct hs_status``."""

    state: Annotated[GateState, ctypes.c_int32]
    causes: Annotated[Cause, ctypes.c_uint32] = NO_CAUSE
    held: Int32 = 0
    quiet: Int32 = 0
    armed: Flag = False
    capturing: Int32 = 0
    window_open: Flag = False
    passed: Int64 = 0
    closes: Int64 = 0
    closed_mono_ns: Int64 = 0
    allowance: Int64 = 0
    let_through: Int64 = 0


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator seen by a trace (``struct hs_traced``)."""

    mono_ns: Int64
    tid: Int32
    phase: Annotated[Phase, ctypes.c_int32]
    name: Text


@dataclass
class Trace:
    """Operators that passed during a trace; filled when the trace ends."""

    count: int = 0
    operators: Sequence[Operator] = ()
