"""One file of a checkpoint: checksummed while it is written, and verified when it is read."""

from __future__ import annotations

import contextlib
import errno
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hydroslurm.checkpoint.manifest import FileEntry
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import CheckpointCorrupt, CheckpointError, SaveAbandoned, UntrustedFile

CHUNK_BYTES = 4 << 20
"""Between two checks of ``cancel``: 4 MiB take a fast disk 2 ms. Of 4, 8 and 16 MiB it was also the
fastest."""

MOST_WHOLE_BYTES = 4 << 30
"""Limit for a file that is read into memory whole: a state without tensors, or DCP's index."""


class ChecksummedFile:
    """Writes one new file in chunks; a second thread computes the checksum of each while it is
    written. A file that is smaller than a chunk does without the thread.

    Enough of a binary file for ``torch.save``. ``write`` never raises, because torch's zip writer
    aborts the process when its destructor meets an error: the first failure is kept, what follows
    is dropped, and :meth:`check` raises it.
    """

    def __init__(
        self,
        path: Path,
        *,
        storage: Storage,
        cancel: threading.Event | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self.path = path
        self._storage = storage
        self._hasher: ThreadPoolExecutor | None = None
        self._cancel = cancel
        self._chunk_bytes = chunk_bytes
        self._pending = bytearray()
        self._written = 0
        self._crc = 0
        self._failure: BaseException | None = None
        self._fd = storage.create(path)

    def tell(self) -> int:
        return self._written + len(self._pending)

    def flush(self) -> None:
        """Do nothing: chunks stay whole until :meth:`finish`."""

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes; ``data`` may be changed or freed as soon as this returns."""
        view = memoryview(data).cast("B")
        if self._failure is None:
            try:
                self._take(view)
            except BaseException as error:
                self._failure = error
        return len(view)

    def check(self) -> None:
        """Raise what went wrong in an earlier ``write``."""
        if self._failure is not None:
            raise self._failure

    def finish(self) -> FileEntry:
        """Write what is pending, fsync and close.

        Raises:
            OSError: of this call or of any write before.
            SaveAbandoned: ``cancel`` was set.
        """
        self.check()
        if self._pending:
            self._emit(memoryview(self._pending))
        self._look_at_cancel()
        self._storage.fsync(self._fd)
        fd, self._fd = self._fd, -1
        self._storage.close(fd)
        return FileEntry(size_bytes=self._written, checksum=f"{self._crc:08x}")

    def abandon(self) -> None:
        """Release the descriptor and the thread if they are still held. Never raises."""
        if self._hasher is not None:
            self._hasher.shutdown()
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with contextlib.suppress(OSError):
                self._storage.close(fd)

    def _take(self, view: memoryview) -> None:
        if len(self._pending) + len(view) < self._chunk_bytes:
            self._pending += view
            return
        if self._pending:
            self._emit(memoryview(self._pending))
            self._pending = bytearray()
        whole = len(view) - len(view) % self._chunk_bytes
        for start in range(0, whole, self._chunk_bytes):
            self._emit(view[start : start + self._chunk_bytes])
        self._pending += view[whole:]

    def _emit(self, chunk: memoryview) -> None:
        self._look_at_cancel()
        if self._hasher is None and len(chunk) >= self._chunk_bytes:
            self._hasher = ThreadPoolExecutor(1, thread_name_prefix="hydroslurm-checksum")
        running = self._hasher and self._hasher.submit(zlib.crc32, chunk, self._crc)
        try:
            self._storage.write(self._fd, chunk)
            with contextlib.suppress(OSError):  # a hint that not every file system supports
                self._storage.write_back(self._fd, offset=self._written, size_bytes=len(chunk))
        finally:
            self._crc = running.result() if running else zlib.crc32(chunk, self._crc)
        self._written += len(chunk)

    def _look_at_cancel(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise SaveAbandoned(f"the save was given up on request at {self.path}")


def write_whole(path: Path, data: bytes, *, storage: Storage) -> FileEntry:
    """Write one small file durably."""
    part = ChecksummedFile(path, storage=storage)
    try:
        part.write(data)
        return part.finish()
    finally:
        part.abandon()


def read_whole(path: Path, *, storage: Storage, limit_bytes: int = MOST_WHOLE_BYTES) -> bytes:
    """All bytes of a file.

    Raises:
        OSError: it cannot be read or is longer than ``limit_bytes``.
    """
    found = bytearray()
    for chunk in chunks(path, storage=storage):
        found += chunk
        if len(found) > limit_bytes:
            what = f"longer than the {limit_bytes} bytes that such a file may have"
            raise OSError(errno.EFBIG, what, str(path))
    return bytes(found)


def chunks(path: Path, *, storage: Storage, chunk_bytes: int = CHUNK_BYTES) -> Iterator[memoryview]:
    """The bytes of a file in pieces; each is valid until the next one is requested."""
    fd = storage.open(path)
    try:
        buffer = memoryview(bytearray(chunk_bytes))
        offset = 0
        while got := storage.read(fd, buffer, offset=offset):
            yield buffer[:got]
            offset += got
    finally:
        storage.close(fd)


def copy_file(
    source: Path,
    target: Path,
    *,
    storage: Storage,
    cancel: threading.Event | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> FileEntry:
    """Copy one file durably; returns the entry of what was read.

    Raises:
        CheckpointCorrupt: the source cannot be read. OSError: the target cannot be written.
    """
    part = ChecksummedFile(target, storage=storage, cancel=cancel, chunk_bytes=chunk_bytes)
    try:
        pieces = chunks(source, storage=storage, chunk_bytes=chunk_bytes)
        while True:
            try:
                piece = next(pieces, None)
            except OSError as error:
                raise CheckpointCorrupt(f"{source} cannot be read: {error.strerror}") from error
            if piece is None:
                return part.finish()
            part.write(piece)
            part.check()
    finally:
        part.abandon()


def check_file(
    path: Path, entry: FileEntry, *, storage: Storage, cancel: threading.Event | None = None
) -> None:
    """Read a file and compare it with its entry.

    Raises:
        CheckpointCorrupt: missing, unreadable, or of another size or checksum.
        CheckpointError: someone else may have written it.
        SaveAbandoned: ``cancel`` was set.
    """
    crc, size_bytes = 0, 0
    try:
        storage.check_trusted(path)
        for chunk in chunks(path, storage=storage):
            crc = zlib.crc32(chunk, crc)
            size_bytes += len(chunk)
            if size_bytes > entry.size_bytes:  # it may be endless
                raise CheckpointCorrupt(
                    f"{path} has more than the {entry.size_bytes} bytes written"
                )
            if cancel is not None and cancel.is_set():
                raise SaveAbandoned(f"reading {path} was given up on request")
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror or error}") from error
    except UntrustedFile as error:
        raise CheckpointError(str(error)) from error
    compare(path, entry, FileEntry(size_bytes, f"{crc:08x}"))


def compare(path: Path, wanted: FileEntry, seen: FileEntry) -> None:
    """Raise CheckpointCorrupt, with both entries, if a file is not what was written."""
    if seen.size_bytes != wanted.size_bytes:
        raise CheckpointCorrupt(
            f"{path} has {seen.size_bytes} bytes; {wanted.size_bytes} were written"
        )
    if seen.checksum != wanted.checksum:
        raise CheckpointCorrupt(
            f"{path} has checksum {seen.checksum}; {wanted.checksum} was written"
        )
