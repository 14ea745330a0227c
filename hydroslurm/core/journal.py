"""Append-only files of one JSON object per line, which survive writers that are killed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.core.files import open_regular, parse_json


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
    """The entries of some lines; torn lines, and those that are no JSON object, are skipped."""
    for line in lines:
        with contextlib.suppress(ValueError):
            entry = parse_json(line)
            if isinstance(entry, dict):
                yield entry
