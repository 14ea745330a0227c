"""Read files that anybody may have written, write them atomically, append to journals, and follow
files that grow.

Readers never follow a link, never wait for a FIFO, never read without bound, and raise only OSError
and ValueError, so any person's run folder can be shown. Whether a file may be *obeyed* is another
question: :mod:`hydroslurm.core.trust`. A journal has one JSON object per line, and survives writers
that are killed at any byte.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAX_DEPTH = 64
"""Upper bound on nesting; what we write stays below ten."""

MOST_LINE_BYTES = 1 << 20
"""Longest line that :func:`new_lines` returns whole."""

MOST_JSON_BYTES = 1 << 30
"""Longest JSON text; readers set lower limits."""

_CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 16 << 10
"""Size of the first read: nearly all small files are shorter."""


def open_regular(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, never following a link in its last part, never waiting; one that is made
    is its owner's (0600).

    Returns:
        A descriptor, closed by the caller, not inherited by children.

    Raises:
        OSError: it cannot be opened, or is a link, a FIFO, a device, a socket or a folder.
    """
    extra = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        _require_regular(os.lstat(path), path)  # opening some devices does something
    except FileNotFoundError:
        pass
    fd = os.open(path, flags | extra, 0o600)
    try:
        _require_regular(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_regular(status: os.stat_result, path: Path | str) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next(word for test, word in _KINDS if test(status.st_mode))
        raise OSError(errno.EINVAL, f"{kind}, where a regular file was expected", str(path))


_KINDS = (
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISSOCK, "a socket"),
    (lambda _: True, "a device"),
)


def read_regular(path: Path | str, *, limit_bytes: int) -> bytes:
    """The whole of a small regular file, in as few calls as a file server has to answer.

    Raises:
        OSError: as for :func:`open_regular`, or it is longer than ``limit_bytes``.
    """
    fd = open_regular(path)
    try:
        data = b""
        # a read that is short is the last one: no other call is needed to see the end
        while len(data) <= limit_bytes:
            most_bytes = max(len(data), _CHUNK_BYTES) if data else _FIRST_BYTES
            asked_bytes = min(limit_bytes + 1 - len(data), most_bytes)
            more = os.read(fd, asked_bytes)
            data += more
            if len(more) < asked_bytes:
                break
    finally:
        os.close(fd)
    if len(data) > limit_bytes:
        what = f"longer than the {limit_bytes} bytes that such a file may have"
        raise OSError(errno.EFBIG, what, str(path))
    return data


def read_end(path: Path, *, most_bytes: int) -> bytes:
    """The last lines of a regular file: all of it, or what begins after the first newline within
    its last ``most_bytes``.

    Raises:
        OSError: as for :func:`open_regular`.
    """
    fd = open_regular(path)
    try:
        before_bytes = max(0, os.fstat(fd).st_size - most_bytes)
        data = os.pread(fd, most_bytes, before_bytes)
    finally:
        os.close(fd)
    return data.partition(b"\n")[2] if before_bytes else data


@contextlib.contextmanager
def atomic_file(
    path: Path, *, mode: int = 0o600, durable: bool = False, exclusive: bool = False
) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` when the block ends without an exception.

    Readers see the old content or the new one, never a part. The temporary file beside
    it is always a new one: nothing that was planted there is followed.

    Args:
        mode: permissions, before the umask.
        durable: survive a crash of the machine: fsync the file before, and its folder after.
        exclusive: ``path`` must not exist yet; of two writers one wins.

    Raises:
        FileExistsError: ``exclusive``, and it does exist.
        OSError: it cannot be written; ``path`` is as it was, and no temporary file is left.
    """
    # in containers every writer may have the same pid, and two nodes may write the same file
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(temporary, flags, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        if exclusive:
            os.link(temporary, path)  # unlike rename(), fails where the name is taken
            temporary.unlink()
        else:
            temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


def write_atomically(
    path: Path,
    content: str | bytes,
    *,
    mode: int = 0o600,
    durable: bool = False,
    exclusive: bool = False,
) -> None:
    """Replace ``path`` with this content (text: UTF-8); arguments as for :func:`atomic_file`."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path, mode=mode, durable=durable, exclusive=exclusive) as file:
        file.write(data)


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash of the machine."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_together(paths: Iterable[Path]) -> None:
    """Make files and folders survive a crash of the machine, side by side: a file system writes its
    journal once for all waiters. For files that nobody relies on yet.

    Raises:
        OSError: one of them cannot be opened or synced.
    """
    from concurrent.futures import ThreadPoolExecutor  # ranks need none

    with ThreadPoolExecutor() as threads:
        syncs = [threads.submit(_fsync, path) for path in paths]
    for sync in syncs:
        sync.result()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY) if path.is_dir() else open_regular(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def new_lines(path: Path, offset: int) -> tuple[list[bytes], int]:
    """The complete lines of a growing file from an offset on, without their newlines, and the
    offset of the next one. The file need not exist yet.

    A line longer than :data:`MOST_LINE_BYTES` comes in parts or not at all, so that a hostile file
    costs neither memory nor the lines after it.

    Raises:
        OSError: as for :func:`open_regular`, but for a file that does not exist.
    """
    # opened each time: on NFS only an open asks the server for the size that the file has now
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return [], offset
    try:
        data = os.pread(fd, MOST_LINE_BYTES, offset)
    finally:
        os.close(fd)
    end = data.rfind(b"\n") + 1
    if not end and len(data) == MOST_LINE_BYTES:
        return [], offset + len(data)
    return data[:end].split(b"\n")[:-1], offset + end


def clean(text: str, *, most: int = 400) -> str:
    """Make untrusted text safe for a terminal, a page or one line: escape what is not printable
    (escapes, newlines, marks that change the direction of writing) and combining characters."""
    text = text if len(text) <= most else f"{text[:most]} ..."
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c.isprintable() and not unicodedata.combining(c) else ascii(c)[1:-1] for c in text
    )


def moment(epoch_ns: int) -> str:
    """Format as local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_ns / 1e9))


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _int64(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= (value := int(text)) < 1 << 63:
        raise ValueError(f"an integer of more than 64 bits: {text[:40]}")
    return value


def _bounded(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


_MOST_DIGITS = 4300
"""Python's own limit, from 3.10.7 on: reading more takes time that grows with their square."""
_QUOTE = ord('"')
_NO_MARKS = bytes(byte for byte in range(256) if byte not in b'"[]{}')
DECODER = json.JSONDecoder(parse_int=None if hasattr(sys, "get_int_max_str_digits") else _bounded)
"""As the standard library reads; depth is for :func:`check_depth`."""
_STRICT = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, parse_int=_int64)


def parse_json(text: str | bytes, *, max_depth: int = MAX_DEPTH, printable: bool = True) -> Any:
    """One JSON value, of numbers and texts that can be calculated with and printed.

    Args:
        printable: False lets lone surrogates pass.

    Raises:
        ValueError: as :func:`decode_json`; NaN or an infinity; an integer of more than 64 bits; a
            lone surrogate.
    """
    if isinstance(text, bytes):
        text = text.decode()
    value = decode_json(text, max_depth=max_depth, decoder=_STRICT)
    if printable and "\\u" in text:
        _require_printable(value)
    return value


def decode_json(
    text: str | bytes, *, max_depth: int = MAX_DEPTH, decoder: json.JSONDecoder = DECODER
) -> Any:
    """One JSON value with any numbers and texts, in half the time of :func:`parse_json`: for
    readers that look at each of them. Takes time and memory in proportion to the text.

    Raises:
        ValueError: not JSON, not UTF-8, longer than :data:`MOST_JSON_BYTES`, nested deeper than
            ``max_depth``, or a number of thousands of digits.
    """
    if len(text) > MOST_JSON_BYTES:
        raise ValueError(f"longer than {MOST_JSON_BYTES} bytes")
    check_depth(text, max_depth=max_depth)
    try:
        return decoder.decode(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:  # where the caller's own stack was deep already
        raise ValueError("nested too deeply") from error


def check_depth(text: str | bytes, *, max_depth: int = MAX_DEPTH) -> None:
    """Raise ValueError for JSON that is nested deeper. The decoder itself stops at Python's limit
    only, which a thread's stack may not reach, and what is that deep cannot even be printed."""
    opening = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if sum(map(text.count, opening)) <= max_depth:  # type: ignore[arg-type]
        return
    data = text.encode(errors="replace") if isinstance(text, str) else text
    # without escapes, each quote begins or ends a string; of "" nothing is left to be told
    marks = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_MARKS)
    depth, in_string = 0, False
    for mark in marks.replace(b'""', b""):
        if mark == _QUOTE:
            in_string = not in_string
        elif not in_string:
            depth += 1 if mark in b"[{" else -1
            if depth > max_depth:
                raise ValueError(f"nested deeper than {max_depth} levels")


def _require_printable(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a text that cannot be printed: {error.reason}") from error


def append_entry(path: Path, entry: Mapping[str, Any], *, durable: bool = True) -> None:
    """Append one entry.

    Args:
        durable: survive a crash of the machine.

    Raises:
        OSError: it cannot be written, or as for :func:`open_regular`.
    """
    text = json.dumps(entry, ensure_ascii=False) + "\n"
    line = text.encode(errors="backslashreplace")  # half a character, as JSON writes it
    fd = open_journal(path)
    try:
        write_all(fd, line)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def open_journal(path: Path) -> int:
    """Open a journal to append whole lines to it; a line that a kill or a full disk tore is ended
    first, or the next one would be lost with it.

    Returns:
        A descriptor, closed by the caller.

    Raises:
        OSError: as for :func:`append_entry`.
    """
    fd = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size_bytes = os.fstat(fd).st_size
        if size_bytes and os.pread(fd, 1, size_bytes - 1) != b"\n":
            write_all(fd, b"\n")
    except BaseException:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: bytes) -> None:
    """Raises OSError: there is no room for all of it."""
    while data:
        data = data[os.write(fd, data) :]


def entries_of(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Decode the entries of a journal's lines; skip torn lines, and lines without a JSON object."""
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = parse_json(line)
            if isinstance(entry, dict):
                yield entry
