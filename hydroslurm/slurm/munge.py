"""MUNGE, Slurm's own proof of identity: a credential that tells its reader our uid.

Bound by ctypes to ``libmunge.so.2``, which every Slurm with ``AuthType=auth/munge`` has; where it
is missing, or its daemon does not answer, :class:`MungeError` says so. Source of the calls:
``munge.h`` of MUNGE 0.5.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydroslurm.errors import HydroslurmError
from hydroslurm.slurm.config import find_slurm_conf

SOCKET_ENV = "HYDROSLURM_MUNGE_SOCKET"
"""Environment variable: munged's socket, where neither MUNGE's default nor slurm.conf has it."""

_CIPHER_TYPE, _TTL, _SOCKET, _UID_RESTRICTION = 0, 4, 8, 9
_AES128, _LONGEST_TTL = 4, -1
_AUTHENTIC = (0, 15, 16, 17)
"""Success; expired, rewound and replayed credentials, which munged reads out all the same."""


class MungeError(HydroslurmError):
    """MUNGE is not there, or will not have this credential."""


class Munge:
    """Makes and reads credentials of this user. For one thread at a time."""

    def __init__(self, socket: str | None = None) -> None:
        """
        Args:
            socket: of munged; None for MUNGE's default.

        Raises:
            MungeError: there is no libmunge, or no memory.
        """
        self.socket = socket
        self._library = _library()
        self._context = self._library.munge_ctx_create()
        if not self._context:
            raise MungeError("munge_ctx_create: no memory")
        if socket:
            self._set(_SOCKET, ctypes.c_char_p(socket.encode()))
        # only this user can read what we make, and nobody on the way
        self._set(_UID_RESTRICTION, ctypes.c_uint32(os.getuid()))
        self._set(_CIPHER_TYPE, ctypes.c_int(_AES128))
        self._set(_TTL, ctypes.c_int(_LONGEST_TTL))

    def __del__(self) -> None:
        if getattr(self, "_context", None):
            self._library.munge_ctx_destroy(self._context)
            self._context = None

    def encode(self, payload: bytes) -> bytes:
        """A credential that only this user can read.

        Raises:
            MungeError: munged does not answer.
        """
        made = ctypes.c_void_p()
        self._check(
            self._library.munge_encode(ctypes.byref(made), self._context, payload, len(payload))
        )
        try:
            return ctypes.string_at(made)
        finally:
            _free(made)

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        """What is in a credential, and the uid of who made it. It may be old, and others may have
        read it before: what proves that its sender is there now is up to the caller.

        Raises:
            MungeError: it is none, or is not meant for this user.
        """
        payload, length = ctypes.c_void_p(), ctypes.c_int(0)
        uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
        status = self._library.munge_decode(
            credential,
            self._context,
            ctypes.byref(payload),
            ctypes.byref(length),
            ctypes.byref(uid),
            ctypes.byref(gid),
        )
        try:
            self._check(0 if status in _AUTHENTIC else status)
            return ctypes.string_at(payload, length.value), uid.value
        finally:
            _free(payload)

    def _set(self, option: int, value: Any) -> None:
        self._check(self._library.munge_ctx_set(self._context, option, value))

    def _check(self, status: int) -> None:
        if status != 0:
            message = self._library.munge_strerror(status)
            where = f" (munged's socket: {self.socket})" if self.socket else ""
            raise MungeError(f"{message.decode(errors='replace')}{where}")


def socket_of(environ: Mapping[str, str]) -> str | None:
    """munged's socket as this site has it: ``HYDROSLURM_MUNGE_SOCKET``, else what slurm.conf says;
    None for MUNGE's default."""
    if named := environ.get(SOCKET_ENV):
        return named
    path = find_slurm_conf(environ)
    found = [] if path is None else _AUTH_SOCKET.findall(_text(path, path.parent))
    return str(found[-1]) if found else None


_AUTH_SOCKET = re.compile(r"(?im)^\s*AuthInfo\s*=\s*\"?(?:[^#\n]*,)?socket=([^,\s#\"]+)")
_INCLUDE = re.compile(r"(?im)^\s*Include\s+([^\s#]+)")
_MOST_INCLUDES = 8


def _text(path: Path, folder: Path, depth: int = 0) -> str:
    """A file of Slurm's with those that it includes, by names relative to slurm.conf's folder;
    without those that cannot be read."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ""
    if depth == _MOST_INCLUDES:
        return text
    return _INCLUDE.sub(lambda found: _text(folder / found[1], folder, depth + 1), text)


def _library() -> Any:
    try:
        library = ctypes.CDLL("libmunge.so.2")
    except OSError as error:
        raise MungeError(f"there is no libmunge here ({error})") from error
    pointer = ctypes.c_void_p
    library.munge_ctx_create.restype = pointer
    library.munge_ctx_destroy.argtypes = [pointer]
    library.munge_ctx_destroy.restype = None
    # the value follows as in C's variadic calls
    library.munge_ctx_set.argtypes = [pointer, ctypes.c_int]
    library.munge_encode.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_int]
    library.munge_decode.argtypes = [ctypes.c_char_p] + [pointer] * 5
    library.munge_strerror.argtypes = [ctypes.c_int]
    library.munge_strerror.restype = ctypes.c_char_p
    return library


def _free(pointer: ctypes.c_void_p) -> None:
    if pointer:
        libc = ctypes.CDLL(None)
        libc.free.argtypes = [ctypes.c_void_p]
        libc.free.restype = None
        libc.free(pointer)
