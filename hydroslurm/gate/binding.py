"""The binding of ``native/gate.h`` and ``marks.h``: structures and signatures only."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydroslurm.core.events import EventKind
from hydroslurm.errors import GateError
from hydroslurm.gate.library import abi_number
from hydroslurm.gate.protocol import (
    GATE_EVENT_KINDS,
    GateEvent,
    GateStatus,
    Operator,
    SignalRule,
)

T = TypeVar("T")

_EVEN_IF_IGNORED, _ONLY_IF_HANDLED = 1, 4


class Signal(ctypes.Structure):
    _fields_ = [
        ("signo", ctypes.c_int32),
        ("action", ctypes.c_int32),
        ("causes", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("result", ctypes.c_int32),
    ]


_HINTS: dict[type[Any], dict[str, Any]] = {
    kind: get_type_hints(kind, include_extras=True) for kind in (GateEvent, GateStatus, Operator)
}


def _structure(kind: type[Any]) -> Any:
    """Return the C structure of a class of the protocol."""
    fields = [(name, hint.__metadata__[0]) for name, hint in _HINTS[kind].items()]
    return type(kind.__name__, (ctypes.Structure,), {"_fields_": fields})


Event, Status, Traced = map(_structure, _HINTS)


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


def value_of(kind: type[T], row: Any) -> T:
    """Return what a structure holds as a value of its class."""
    return kind(**{name: _read(hint, getattr(row, name)) for name, hint in _HINTS[kind].items()})


def _read(hint: Any, value: Any) -> Any:
    kind = hint.__origin__
    if kind is EventKind:
        return GATE_EVENT_KINDS[value - 1]
    return value.decode(errors="replace") if kind is str else kind(value)
