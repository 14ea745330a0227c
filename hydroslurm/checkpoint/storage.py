"""Every I/O call of a commit, a verification and a removal.

One method is one call that can fail or be the last one of a killed process. The tests replace this
object by one that fails or kills at the n-th call, which is how the commit rule is proved; so
whatever creates, writes, reads, renames or removes a part of a checkpoint does it through this
object.
"""

from __future__ import annotations

import os
from pathlib import Path

from hydroslurm.core.files import open_regular
from hydroslurm.core.trust import check_trusted

FILE_MODE, FOLDER_MODE = 0o644, 0o755
"""Before the umask: the folder that a checkpoint is in decides who may read it. Nobody else may
write one, even if the umask would let the group: it could not be trusted any more."""


class Storage:
    """The mounted file systems of this machine, including parallel and network ones. Paths are
    absolute or relative to the working directory; numbers are file descriptors. Every method raises
    OSError and leaves cleaning up to its caller.

    On NFS, ``listdir`` opens the folder, and close-to-open consistency makes the client ask the
    server: it sees what another node has committed.
    """

    def mkdir(self, path: Path) -> None:
        """Make one folder; FileExistsError when there is one."""
        path.mkdir(mode=FOLDER_MODE)

    def create(self, path: Path) -> int:
        """Make a file for writing; FileExistsError when there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)

    def write(self, fd: int, data: memoryview) -> None:
        """Append all of ``data``."""
        while data:
            # a full disk can take a part first, and say so at the next call only
            data = data[os.write(fd, data) :]

    def write_back(self, fd: int, *, offset: int, size_bytes: int) -> None:
        """Hint that the disk may begin with what was written; returns at once."""
        # Without this the disk idles until fsync, and then the CPU does: on ext4 over NVMe, 500 MB
        # took 0.29 to 0.6 s without and 0.22 to 0.26 s with it. For DONTNEED, Linux starts writing
        # dirty pages back before it drops clean ones (mm/fadvise.c: generic_fadvise): a
        # sync_file_range that Python offers.
        os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Wait until everything written is on the disk."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Give the descriptor back."""
        os.close(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces a file or an empty folder, and nothing else."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file another name; FileExistsError when something has it."""
        os.link(source, target, follow_symlinks=False)

    def fsync_dir(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def rmdir(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def listdir(self, path: Path) -> list[str]:
        """The names in a folder, sorted."""
        return sorted(entry.name for entry in path.iterdir())

    def check_trusted(self, path: Path) -> None:
        """Raise UntrustedFile for a folder or a file that someone else may have written."""
        check_trusted(path, what="the checkpoint", shared=True)

    def open(self, path: Path) -> int:
        """Open a regular file for reading; a link, FIFO or device is an error, not waited for."""
        return open_regular(path)

    def size(self, fd: int) -> int:
        """Of an open file, in bytes."""
        return os.fstat(fd).st_size

    def read_ahead(self, fd: int, *, offset: int, size_bytes: int) -> None:
        """Hint that this will be read soon."""
        os.posix_fadvise(fd, offset, size_bytes, os.POSIX_FADV_WILLNEED)

    def read(self, fd: int, into: memoryview, *, offset: int) -> int:
        """Fill a buffer, or a part of it; 0 at the end of the file. Thread-safe."""
        return os.preadv(fd, [into], offset)


class AnyonesStorage(Storage):
    """For checkpoints that a person has named, whoever wrote them: a colleague's, to start from or
    inspect. Nothing in a checkpoint is ever executed. What a restarted job picks up by itself is
    different: it could train on forged weights without anybody noticing."""

    def check_trusted(self, path: Path) -> None:
        pass
