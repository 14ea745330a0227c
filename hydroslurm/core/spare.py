"""Room for a few lines on a disk that is full: a small file that is written over in place.

A log cannot grow on a full disk, and yet others wait for what stands in it. So a log takes 16 KiB
while the disk has them, and has there what could not be appended, until it can be.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from hydroslurm.core.files import open_regular, read_regular

SPARE_BYTES = 16 * 1024
"""Some fifty events: half a dozen pauses."""


class Spare:
    """The file beside a log. Its room is taken while the disk has some: writing over it in place
    needs no more, on every file system that does not copy on write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._is_filled = False

    def take_room(self) -> list[bytes]:
        """Make the file, whole. The lines that another process left in it are returned.

        Where there is no room, or never will be, the log is as good as it is without.
        """
        if self._fd is not None:
            return []
        left = read_spare(self._path)
        try:
            self._fd = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            if os.fstat(self._fd).st_size < SPARE_BYTES:
                self._put(b"\n" * SPARE_BYTES)
        except OSError:
            self.close()
            return []
        self._is_filled = bool(left)
        return left

    def fill(self, lines: Iterable[bytes]) -> None:
        """Have exactly these lines in it; costs nothing as long as there are none."""
        text = b"".join(lines)
        was_filled, self._is_filled = self._is_filled, bool(text)
        if self._fd is None or not (text or was_filled):
            return
        try:
            self._put(text.ljust(SPARE_BYTES, b"\n"))
        except OSError:
            self.close()

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _put(self, text: bytes) -> None:
        assert self._fd is not None
        if os.pwrite(self._fd, text, 0) != len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def spare_of(path: Path) -> Path:
    """The file beside a log that has what could not be appended."""
    return path.with_suffix(".spare")


def read_spare(path: Path) -> list[bytes]:
    """The lines in a spare file, each with its newline; none where all is well."""
    try:
        text = read_regular(path, limit_bytes=SPARE_BYTES)
    except OSError:
        return []
    return [line + b"\n" for line in text.split(b"\n") if line.strip(b"\0 ")]
