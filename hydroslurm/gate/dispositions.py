"""Who has a signal: the kernel's table of handlers, read and written past CPython."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any

NOBODY = (signal.SIG_DFL, signal.SIG_IGN)

Handler = Callable[[int, FrameType | None], Any] | int | None
"""As ``signal.getsignal`` shows them."""


class OwnerKind(Enum):
    """Whose a handler is that is installed in the place of the gate's."""

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


def owner_shown(signo: int, ours: Handler) -> Owner:
    """Whose a signal is for all that Python knows. ``ours``: the gate's Python handler."""
    handler = signal.getsignal(signo)
    if handler in NOBODY:
        kind = OwnerKind.DEFAULT if handler == signal.SIG_DFL else OwnerKind.IGNORED
        return Owner(kind)
    return Owner(OwnerKind.OURS) if handler == ours else Owner(OwnerKind.PYTHON, handler)


def is_hydroslurms(handler: Handler) -> bool:
    """Whether it is one that hydroslurm had put there before (``autoload.keep_alive``)."""
    return str(getattr(handler, "__module__", None)).startswith("hydroslurm.")


# The layout (handler, 128 bytes of mask, the rest) is glibc's and musl's on every 64-bit Linux.

_libc = ctypes.CDLL(None, use_errno=True)


class _SharedObject(ctypes.Structure):
    _fields_ = [
        ("path", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def block_all_during(signo: int) -> None:
    """Keep other signals off while CPython's C handler for this one runs.

    CPython installs it with an empty mask. Of two that are pending at once the kernel then
    interrupts the first handler, before its first instruction, with the second: USR1 and USR2
    arrive in the pipe as USR2 and USR1, and the rank stays paused. With a full mask they arrive
    by number.
    """
    if (action := _read(signo)) is not None:
        ctypes.memset(ctypes.addressof(action) + ctypes.sizeof(ctypes.c_void_p), 0xFF, 128)
        _libc.sigaction(signo, action, None)


def _read(signo: int) -> ctypes.Array[ctypes.c_char] | None:
    action = ctypes.create_string_buffer(256)
    return action if _libc.sigaction(signo, None, action) == 0 else None


def address_of(signo: int) -> int:
    """Where the installed handler is; 0 for the default action, 1 where the signal is ignored."""
    action = _read(signo)
    return 0 if action is None else (ctypes.c_void_p.from_buffer(action).value or 0)


@contextlib.contextmanager
def kernel_kept(signo: int) -> Iterator[None]:
    """Within it CPython may install; afterwards the kernel has again what it had before."""
    action = _read(signo)
    try:
        yield
    finally:
        if action is not None:
            _libc.sigaction(signo, action, None)


def library_of(address: int) -> str:
    """The file whose code is there; empty where it is not known."""
    found = _SharedObject()
    if not _libc.dladdr(ctypes.c_void_p(address), ctypes.byref(found)) or not found.path:
        return ""
    return Path(os.fsdecode(found.path)).name
