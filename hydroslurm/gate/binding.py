"""The binding of ``native/gate.h`` and ``marks.h``: structures and signatures only."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydroslurm.errors import GateError
from hydroslurm.gate.compiler import abi_number
from hydroslurm.gate.protocol import (
    GATE_EVENT_KINDS,
    Cause,
    GateEvent,
    GateState,
    GateStatus,
    Operator,
    Phase,
    SignalRule,
)

_TEXT_BYTES = 64
_EVEN_IF_IGNORED, _ONLY_IF_HANDLED = 1, 4


class Signal(ctypes.Structure):
    _fields_ = [
        ("signo", ctypes.c_int32),
        ("action", ctypes.c_int32),
        ("causes", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("result", ctypes.c_int32),
    ]


class Event(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int32),
        ("signo", ctypes.c_int32),
        ("mono_ns", ctypes.c_int64),
        ("epoch_ns", ctypes.c_int64),
        ("value_ns", ctypes.c_int64),
        ("causes", ctypes.c_uint32),
        ("sender_pid", ctypes.c_int32),
        ("tid", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("held", ctypes.c_int32),
        ("quiet", ctypes.c_int32),
        ("count", ctypes.c_int64),
        ("passed", ctypes.c_int64),
        ("text", ctypes.c_char * _TEXT_BYTES),
    ]


class Status(ctypes.Structure):
    _fields_ = [
        ("state", ctypes.c_int32),
        ("causes", ctypes.c_uint32),
        ("held", ctypes.c_int32),
        ("quiet", ctypes.c_int32),
        ("armed", ctypes.c_int32),
        ("capturing", ctypes.c_int32),
        ("window_open", ctypes.c_int32),
        ("passed", ctypes.c_int64),
        ("closes", ctypes.c_int64),
        ("closed_mono_ns", ctypes.c_int64),
        ("allowance", ctypes.c_int64),
        ("let_through", ctypes.c_int64),
    ]


class Traced(ctypes.Structure):
    _fields_ = [
        ("mono_ns", ctypes.c_int64),
        ("tid", ctypes.c_int32),
        ("phase", ctypes.c_int32),
        ("text", ctypes.c_char * _TEXT_BYTES),
    ]


class LaunchAhead(ctypes.Structure):
    _fields_ = [
        ("bound_ns", ctypes.c_int64),
        ("events", ctypes.c_int64),
        ("waits", ctypes.c_int64),
        ("waited_ns", ctypes.c_int64),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "gate_start": (ctypes.c_int, [ctypes.POINTER(Signal), ctypes.c_int, ctypes.c_int]),
    "gate_stop": (ctypes.c_int, []),
    "gate_request": (ctypes.c_int, [ctypes.c_int, ctypes.c_uint32]),
    "gate_let_through": (ctypes.c_int, [ctypes.c_int64]),
    "gate_hold_here": (ctypes.c_int, []),
    "gate_status": (ctypes.c_int, [ctypes.POINTER(Status)]),
    "gate_read": (ctypes.c_int, [ctypes.POINTER(Event), ctypes.c_int]),
    "gate_claim": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
    "gate_exempt": (ctypes.c_int, [ctypes.c_int]),
    "gate_check_handlers": (ctypes.c_int, []),
    "gate_owns": (ctypes.c_int, [ctypes.c_int]),
    "gate_retake": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
    "gate_deliver": (ctypes.c_int, [ctypes.c_int]),
    "gate_trace_start": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
    "gate_trace_count": (ctypes.c_int64, []),
    "gate_trace_stop": (ctypes.c_int, [ctypes.POINTER(Traced), ctypes.c_int]),
    "gate_bound_launches": (ctypes.c_int, [ctypes.c_int, ctypes.c_int64]),
    "gate_launches": (ctypes.c_int, [ctypes.POINTER(LaunchAhead)]),
    "marks_use": (ctypes.c_int, [ctypes.c_uint32]),
    "marks_name_signal": (None, [ctypes.c_int, ctypes.c_char_p]),
    "marks_begin": (ctypes.c_uint64, [ctypes.c_int, ctypes.c_uint64]),
    "marks_end": (None, [ctypes.c_uint64]),
    "marks_message": (None, [ctypes.c_char_p]),
}


def bind(path: Path) -> ctypes.CDLL:
    """Load a gate and set the signature of each function. It stays loaded until the process ends.

    Raises:
        GateError: it cannot be loaded, or has another ABI.
    """
    import torch  # noqa: F401 - loads the libraries that the gate needs

    try:
        library = ctypes.CDLL(str(path))
        library.hs_gate_abi.restype = ctypes.c_int
        library.hs_gate_abi.argtypes = []
        if library.hs_gate_abi() != abi_number():
            raise GateError(
                f"{path} has ABI {library.hs_gate_abi()}, wanted {abi_number()}; remove it "
                "and let it be rebuilt"
            )
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, f"hs_{name}")
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise GateError(f"the gate {path} cannot be loaded: {error}") from error
    return library


def signal_line(rule: SignalRule) -> Signal:
    """Return a rule as a line of the signal table."""
    flags = (_EVEN_IF_IGNORED if rule.even_if_ignored else 0) | (
        _ONLY_IF_HANDLED if rule.only_if_handled else 0
    )
    return Signal(signo=rule.signo, action=rule.action, causes=rule.causes, flags=flags)


def gate_event(row: Event) -> GateEvent:
    """Return an event as a value."""
    return GateEvent(**_fields(row))


def gate_status(now: Status) -> GateStatus:
    """Return the status as a value."""
    return GateStatus(**_fields(now))


def operator(row: Traced) -> Operator:
    """Return a line of a trace as a value."""
    fields = _fields(row)
    return Operator(fields.pop("text"), **fields)


def _fields(row: ctypes.Structure) -> dict[str, Any]:
    """Return the fields of a structure, each with its value's type."""
    return {
        name: _READ[name](getattr(row, name)) if name in _READ else getattr(row, name)
        for name, *_ in row._fields_
    }


_READ: dict[str, Callable[[Any], Any]] = {
    "kind": lambda number: GATE_EVENT_KINDS[number - 1],
    "causes": Cause,
    "phase": Phase,
    "state": GateState,
    "armed": bool,
    "window_open": bool,
    "text": lambda text: text.decode(errors="replace"),
}
