"""Verifies that checkpoints are what was written."""

from __future__ import annotations

import threading
from pathlib import Path

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.catalog import EPOCH, Checkpoint, read_again, read_manifest
from hydroslurm.checkpoint.checksummed_file import check_file
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import CheckpointCorrupt, CheckpointError


class Checker:
    """Verifies checkpoints and remembers the good ones.

    :meth:`is_good`, which a stop waits for, does not reread what this process has written or
    verified; :meth:`verify` always reads.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._good: set[tuple[Path, int]] = set()

    def verify(
        self,
        checkpoint: Checkpoint,
        *,
        cancel: threading.Event | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Read all of it.

        Args:
            share: (rank, world size) of ranks that divide the files among themselves. None of them
                alone knows whether the checkpoint is good.

        Raises:
            CheckpointCorrupt: names the first file that is not what was written.
            CheckpointTooNew: a newer release has meanwhile replaced its manifest.
            SaveAbandoned: ``cancel`` was set.
        """
        self._good.discard(_key(checkpoint))
        files = read_again(checkpoint, storage=self._storage).files
        rank, of_ranks = share
        for name in sorted(files)[rank::of_ranks]:
            check_file(checkpoint.path / name, files[name], storage=self._storage, cancel=cancel)
        if of_ranks == 1:
            self.trust(checkpoint)

    def glance(self, checkpoint: Checkpoint) -> None:
        """Compare sizes only.

        Raises:
            CheckpointCorrupt: names the first file that is missing or has another size.
        """
        for name, entry in checkpoint.manifest.files.items():
            path = checkpoint.path / name
            try:
                fd = self._storage.open(path)
                size_bytes = self._storage.size(fd)
                self._storage.close(fd)
            except OSError as error:
                raise CheckpointCorrupt(f"{path} cannot be read: {error.strerror}") from error
            if size_bytes != entry.size_bytes:
                raise CheckpointCorrupt(
                    f"{path} has {size_bytes} bytes; {entry.size_bytes} were written"
                )

    def trust(self, checkpoint: Checkpoint) -> None:
        """Remember a checkpoint that was just written as good."""
        self._good.add(_key(checkpoint))

    def good_at(self, path: Path) -> Checkpoint | None:
        """The checkpoint at this path if there is one and it is good."""
        try:
            found = Checkpoint(path, read_manifest(path, storage=self._storage))
        except CheckpointError:
            return None
        return found if self.is_good(found) else None

    def place_for(
        self,
        directory: Path,
        step: int,
        *,
        again: bool,
        kind: str,
    ) -> tuple[Path, Checkpoint | None]:
        """Where a save of this step goes, and the good checkpoint there that makes it unnecessary.

        Args:
            kind: of the save. Epoch checkpoints and other kinds do not stand in for each other.
            again: the state may differ from earlier saves of this step, so that none of them will
                do: it goes beside them, under the next number.

        Raises:
            OSError: the folder cannot be listed; a missing one is empty.
        """
        newest = self.newest_number(directory, step)
        if again:
            return folders.of_step(directory, step, newest + 1), None
        target = folders.of_step(directory, step, max(newest, 1))
        there = self.good_at(target)
        if there is not None and (there.kind == EPOCH) != (kind == EPOCH):
            return folders.of_step(directory, step, newest + 1), None
        return target, there

    def newest_number(self, directory: Path, step: int) -> int:
        """As ``folders.newest_number``; raises OSError as :meth:`place_for`."""
        try:
            return folders.newest_number(self._storage.listdir(directory), step)
        except FileNotFoundError:
            return 0

    def is_good(self, checkpoint: Checkpoint) -> bool:
        """Whether it verifies or has verified before."""
        if _key(checkpoint) in self._good:
            return True
        try:
            self.verify(checkpoint)
        except CheckpointError:
            return False
        return True


def _key(checkpoint: Checkpoint) -> tuple[Path, int]:
    return checkpoint.path, checkpoint.manifest.created_epoch_ns
