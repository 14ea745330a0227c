"""One file of a checkpoint: checksummed while it is written, and verified when it is read."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from isal.isal_zlib import crc32

from hydroslurm.checkpoint.storage import Storage
from hydroslurm.core.decoding import Count
from hydroslurm.errors import CheckpointCorrupt, CheckpointError, SaveAbandoned, UntrustedFile

CHUNK_BYTES = 4 << 20
"""Between two checks of ``cancel``: 4 MiB take a fast disk 2 ms. Of 4, 8 and 16 MiB it was also the
fastest."""

BLOCK_BYTES = 1 << 20
"""Every block of a file has its own checksum: threads can verify a file while they read it, and who
needs a part of a file verifies what it reads. Part of the format. Small enough to be in the
processor's cache when it is checksummed after it was read."""

MOST_WHOLE_BYTES = 4 << 30
"""Limit for a file that is read into memory whole: a state without tensors, or an index."""


Word = Annotated[str, msgspec.Meta(max_length=80)]


@dataclass(frozen=True)
class FileEntry:
    """One file as it was written."""

    size_bytes: Count
    checksum: Word


class BlockSums:
    """The checksums of the blocks of a file, from its bytes in order."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._done: list[int] = []
        self._crc = 0

    def update(self, data: memoryview) -> None:
        """Take the next bytes. Releases the GIL for large ones."""
        while data:
            room = BLOCK_BYTES - self.size_bytes % BLOCK_BYTES
            self._crc = crc32(data[:room], self._crc)
            self.size_bytes += min(room, len(data))
            if self.size_bytes % BLOCK_BYTES == 0:
                self._done.append(self._crc)
                self._crc = 0
            data = data[room:]

    @property
    def blocks(self) -> tuple[int, ...]:
        """So far."""
        return (*self._done, *([self._crc] if self.size_bytes % BLOCK_BYTES else []))

    @property
    def entry(self) -> FileEntry:
        """Of the bytes so far."""
        return FileEntry(self.size_bytes, checksum_of(self.blocks))


def checksum_of(blocks: Iterable[int]) -> str:
    """The checksum of a file, from those of its blocks: of one block that of the block itself, of
    several the checksum of theirs, four bytes each."""
    first, *more = tuple(blocks) or (0,)
    if more:
        first = crc32(b"".join(crc.to_bytes(4, "big") for crc in (first, *more)))
    return f"{first:08x}"


class ChecksummedFile:
    """Writes one new file in chunks, each checksummed just before. A context manager, which gives
    the descriptor back.

    Not in a second thread while it is written: the checksum takes a tenth of the time of the write,
    and what it has read is in the processor's cache for the write.
    """

    def __init__(
        self,
        path: Path,
        *,
        storage: Storage,
        cancel: threading.Event | None = None,
    ) -> None:
        self.path = path
        self._storage = storage
        self._cancel = cancel
        self._sums = BlockSums()
        self._fd = storage.create(path)

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._storage.close(self._fd)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The checksums of the blocks of what is written."""
        return self._sums.blocks

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; ``data`` may be changed or freed as soon as this returns.

        Raises:
            OSError: the disk does not take them. SaveAbandoned: ``cancel`` was set.
        """
        view = memoryview(data)
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = view[start : start + CHUNK_BYTES]
            self._look_at_cancel()
            offset = self._sums.size_bytes
            self._sums.update(chunk)
            self._storage.write(self._fd, chunk)
            with contextlib.suppress(OSError):  # a hint that not every file system supports
                self._storage.write_back(self._fd, offset=offset, size_bytes=len(chunk))

    def finish(self) -> FileEntry:
        """Fsync and close.

        Raises:
            OSError: a call failed. SaveAbandoned: ``cancel`` was set.
        """
        self._look_at_cancel()
        self._storage.fsync(self._fd)
        fd, self._fd = self._fd, -1
        self._storage.close(fd)
        return self._sums.entry

    def _look_at_cancel(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise SaveAbandoned(f"the save was given up on request at {self.path}")


def write_whole(
    path: Path,
    pieces: Iterable[bytes | memoryview],
    *,
    storage: Storage,
    cancel: threading.Event | None = None,
) -> FileEntry:
    """Write one file durably; raises as :class:`ChecksummedFile` and what ``pieces`` raises."""
    with ChecksummedFile(path, storage=storage, cancel=cancel) as file:
        for piece in pieces:
            file.write(piece)
        return file.finish()


def read_whole(path: Path, *, storage: Storage, limit_bytes: int) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: it cannot be read or is longer than ``limit_bytes``.
    """
    found = bytearray()
    fd = storage.open(path)
    try:
        for chunk in _chunks(fd, storage=storage):
            found += chunk
            if len(found) > limit_bytes:
                what = f"longer than the {limit_bytes} bytes that such a file may have"
                raise OSError(errno.EFBIG, what, str(path))
    finally:
        storage.close(fd)
    return bytes(found)


def _chunks(fd: int, *, storage: Storage) -> Iterator[memoryview]:
    """The bytes of a file in pieces; each is valid until the next one is requested."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    offset = 0
    while got := storage.read(fd, buffer, offset=offset):
        yield buffer[:got]
        offset += got


def open_checked(path: Path, entry: FileEntry, *, storage: Storage) -> int:
    """Open a file that has as many bytes as were written; the caller closes it.

    Raises:
        CheckpointCorrupt: missing, unreadable, or of another size.
        CheckpointError: someone else may have written it.
    """
    try:
        fd = storage.open(path)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        storage.check_trusted(path)
        size_bytes = storage.size(fd)
        if size_bytes != entry.size_bytes:
            raise _other_size(path, size_bytes, entry)
    except BaseException as error:
        with contextlib.suppress(OSError):
            storage.close(fd)
        if isinstance(error, OSError):
            raise unreadable(path, error) from error
        if isinstance(error, UntrustedFile):
            raise CheckpointError(str(error)) from error
        raise
    return fd


def require_size(path: Path, entry: FileEntry, *, storage: Storage) -> None:
    """Check that as many bytes as were written are stored; raises as :func:`open_checked`."""
    fd = open_checked(path, entry, storage=storage)
    with contextlib.suppress(OSError):
        storage.close(fd)


def unreadable(path: Path, error: OSError) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} cannot be read: {error.strerror or error}")


def _other_size(path: Path, size_bytes: int, entry: FileEntry) -> CheckpointCorrupt:
    return CheckpointCorrupt(f"{path} has {size_bytes} bytes; {entry.size_bytes} were written")


def read_checked(path: Path, entry: FileEntry, *, storage: Storage) -> bytes:
    """All bytes of a file that are what was written.

    Raises:
        CheckpointCorrupt: as :func:`check_file`, or it is longer than :data:`MOST_WHOLE_BYTES`.
        CheckpointError: as :func:`check_file`.
    """
    if entry.size_bytes > MOST_WHOLE_BYTES:
        what = f"{entry.size_bytes} bytes; at most {MOST_WHOLE_BYTES} are read into memory"
        raise CheckpointCorrupt(f"{path} has {what}")
    found = bytearray()
    for chunk in checked_chunks(path, entry, storage=storage):
        found += chunk
    return bytes(found)


def check_file(path: Path, entry: FileEntry, *, storage: Storage) -> None:
    """Read a file and compare it with its entry.

    Raises:
        CheckpointCorrupt: missing, unreadable, or of another size or checksum.
        CheckpointError: someone else may have written it.
    """
    deque(checked_chunks(path, entry, storage=storage), maxlen=0)


def checked_chunks(path: Path, entry: FileEntry, *, storage: Storage) -> Iterator[memoryview]:
    """The bytes of a file in pieces, not to be used before the last one has come; raises as
    :func:`check_file`."""
    sums = BlockSums()
    fd = open_checked(path, entry, storage=storage)
    try:
        for chunk in _chunks(fd, storage=storage):
            sums.update(chunk)
            if sums.size_bytes > entry.size_bytes:  # somebody appends to it
                break
            yield chunk
    except OSError as error:
        raise unreadable(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            storage.close(fd)
    seen = sums.entry
    if seen.size_bytes != entry.size_bytes:
        raise _other_size(path, seen.size_bytes, entry)
    if seen.checksum != entry.checksum:
        raise CheckpointCorrupt(
            f"{path} has checksum {seen.checksum}; {entry.checksum} was written"
        )
