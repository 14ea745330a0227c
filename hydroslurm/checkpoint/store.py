"""The checkpoints of a run: write, list, verify, load, prune."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from hydroslurm.checkpoint import commit, manifest, reader, retention
from hydroslurm.checkpoint.catalog import Checker, Checkpoint, Problem, look, read_again
from hydroslurm.checkpoint.checksummed_file import CHUNK_BYTES
from hydroslurm.checkpoint.frozen import FrozenFiles
from hydroslurm.checkpoint.save import Save
from hydroslurm.checkpoint.save_round import PATIENCE_S, SOLO, Peers, SaveRound
from hydroslurm.checkpoint.storage import Storage, TimedSyncs
from hydroslurm.checkpoint.write_plan import State, WritePlan
from hydroslurm.core.fence import Fence
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import CheckpointError, SaveFailed

__all__ = ["Checkpoint", "CheckpointStore", "State"]


class CheckpointStore:
    """One folder of checkpoints. Any number of processes may use a folder at the same time, even
    for the same step. So may the threads of one: around a stop, a save that was given up may still
    be writing beside the next one. Loading is for one thread at a time.

    Attributes:
        peers: the ranks that save together; ``SOLO`` for one that saves alone.
        checker: verifies as one of several ranks, and remembers what was good.
        frozen: the files of what is frozen. It wants to be told of a checkpoint of this folder that
            is older than any that is written from now on (``note``).
        syncs: how long the disk takes.
        pins: keep checkpoints from everybody's retention.
    """

    def __init__(
        self,
        directory: Path,
        *,
        storage: Storage | None = None,
        peers: Peers | None = None,
        fence: Fence | None = None,
        patience_s: float = PATIENCE_S,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Touches no disk; the first save makes the folder.

        Args:
            peers: the ranks that save together, into a folder that all of them see; None: alone.
            fence: of the run that the folder belongs to; a newer attempt of the run ends all
                writing.
            patience_s: how long :meth:`write` waits for the peers at each agreement.
        """
        self.directory = directory
        self.syncs = TimedSyncs(Storage() if storage is None else storage)
        self._storage = cast("Storage", self.syncs)
        self.peers = SOLO if peers is None or peers.world_size == 1 else peers
        self._fence = fence
        self._patience_s = patience_s
        self._chunk_bytes = chunk_bytes
        self.checker = Checker(self._storage)
        self.frozen = FrozenFiles(self.peers.rank, self._storage)
        self.pins = retention.Pins(self._storage)

    def write(
        self,
        state: State | WritePlan,
        *,
        step: int,
        epoch: int = 0,
        kind: str,
        meta: Mapping[str, Any] | None = None,
        cancel: threading.Event | None = None,
        topic: str | None = None,
        written: Callable[[], None] | None = None,
        again: bool = False,
    ) -> Checkpoint:
        """Save; returns when the checkpoint is committed and durable.

        If a good checkpoint of this step exists it is returned instead, unless ``again`` is set;
        epoch checkpoints and other kinds do not stand in for each other. ``state`` must not change
        meanwhile. With peers, every rank calls this for the same step, and all of them return or
        raise the same.

        Args:
            state: or its write plan.
            meta: plain JSON values for the manifest; with peers, rank 0's count.
            cancel: checked between chunks; setting it ends the save before its commit.
            topic: of this save in the peers' agreements, used once; made of the step and the kind
                when None, so that the same save cannot be tried twice.
            written: called when this rank's part is on the disk, before the commit; not if the
                step is already committed. It must not raise.
            again: the state may have changed since this step was saved: write a new checkpoint,
                which becomes the newer one, and leave the old one alone.

        Raises:
            UnsavableState: nothing was written.
            SaveAbandoned: ``cancel`` was set. Earlier checkpoints are intact.
            SaveFailed: an I/O call failed, or a rank is gone. Earlier checkpoints are intact.
            StaleAttempt: a newer attempt owns the run folder. Earlier checkpoints are intact.
        """
        header = manifest.begun(
            step=step, epoch=epoch, kind=kind, meta=meta or {}, torch_version=torch.__version__
        )
        save_round = SaveRound(
            self.peers,
            topic=f"save/{step}/{kind}" if topic is None else topic,
            step=step,
            timeout_s=self._patience_s,
            cancel=cancel,
        )
        return Save(
            self.directory,
            save_round,
            storage=self._storage,
            checker=self.checker,
            stored=self.frozen,
            chunk_bytes=self._chunk_bytes,
            may_commit=lambda: self._check_fence(f"the save of step {step}"),
            written=written,
            again=again,
        ).write(state, header)

    def look(self) -> list[Checkpoint | Problem]:
        """Everything named like a checkpoint, oldest first. Reads manifests only."""
        return look(self.directory, storage=self._storage)

    def committed(self) -> tuple[Checkpoint, ...]:
        """All committed checkpoints, oldest first. Reads manifests only; see :meth:`problems`."""
        return tuple(one for one in self.look() if isinstance(one, Checkpoint))

    def problems(self) -> Mapping[Path, CheckpointError]:
        """Folders named like a checkpoint whose manifest cannot be read."""
        return {one.path: one.error for one in self.look() if isinstance(one, Problem)}

    def verify(self, checkpoint: Checkpoint, *, cancel: threading.Event | None = None) -> None:
        """Read all of it and compare it with the manifest.

        Raises:
            CheckpointCorrupt: names the first file that differs, and how.
            CheckpointTooNew: a newer release has meanwhile replaced its manifest.
            SaveAbandoned: ``cancel`` was set.
        """
        self.pins.pin(checkpoint.path)
        self.checker.verify(checkpoint, cancel=cancel)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        only: Collection[str] | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> State:
        """Read a state, and compare what is read with what was written; its tensors are on the CPU
        and belong to the caller.

        It may have been saved by another number of ranks. Its ``own`` is what the same rank saved;
        empty for a rank that had no part in the save.

        Args:
            only: names of ``shared`` and ``own`` to read; all of them when None.
            like: name -> a tree whose DTensors say how tensors are laid out over today's ranks
                (see ``tree.tensor_keys``). The other tensors come back whole.

        Raises:
            CheckpointCorrupt: a file is not what was written.
            CheckpointError: someone else may have written one.
            CheckpointMissing: a name in ``only`` was not saved; says what was.
        """
        with self.pins.holding(), without_gc():
            self.pins.pin(checkpoint.path)
            return reader.read_state(
                self.files_of(checkpoint), rank=self.peers.rank, only=only, like=like
            )

    def load_own(self, checkpoint: Checkpoint, rank: int) -> Mapping[str, Any]:
        """The ``own`` of any rank that took part in the save.

        Raises:
            CheckpointMissing: no such rank took part in the save.
            CheckpointCorrupt, CheckpointError: as :meth:`load`.
        """
        return reader.read_own(self.files_of(checkpoint), rank=rank)

    def files_of(self, checkpoint: Checkpoint) -> reader.CheckpointFiles:
        """The files of a checkpoint, to be read and verified one by one.

        Raises:
            CheckpointCorrupt: it is gone or is another one.
            CheckpointError: someone else may have written it.
        """
        files = read_again(checkpoint, storage=self._storage).files
        return reader.CheckpointFiles(checkpoint.path, files, storage=self._storage)

    def revoke_others(self) -> None:
        """End all saves of other processes (see ``commit.revoke``). For an attempt that has claimed
        the run folder.

        Raises:
            SaveFailed: one of their folders cannot be removed.
        """
        try:
            commit.revoke(self.directory, storage=self._storage)
        except OSError as error:
            raise SaveFailed(
                f"unfinished saves of an earlier attempt in {self.directory} cannot be removed: "
                f"{error.strerror or error}. They may be written to still"
            ) from error

    def prune(
        self, *, keep: int, keep_stop: int = 2, keep_epochs: int | None = None
    ) -> tuple[Path, ...]:
        """Remove older checkpoints and what killed saves left. Call it after a commit.

        Keeps ``keep_stop`` of kind "stop", ``keep_epochs`` of kind "epoch" (None: all of them) and
        ``keep`` of the other kinds, at least two in all, and always the newest good one. A failure
        is a RuntimeWarning.

        Returns:
            The checkpoints that were removed. With peers, only rank 0 removes any.
        """
        retention.check_counts(keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs)
        if self.peers.rank != 0:
            return ()
        removed: list[Path] = []
        what = f"removing old checkpoints of {self.directory}"
        try:
            found = self.committed()
            rest = retention.beyond(found, keep=keep, keep_stop=keep_stop, keep_epochs=keep_epochs)
            newest_good = next((one for one in reversed(found) if self.checker.is_good(one)), None)
            for one in () if newest_good is None else rest:
                if one == newest_good:
                    continue
                self._check_fence(what)
                if one.path.name not in retention.pinned(self.directory, storage=self._storage):
                    commit.remove(one.path, storage=self._storage)
                    removed.append(one.path)
            self._check_fence(what)
            commit.remove_leftovers(self.directory, storage=self._storage)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"hydroslurm: old checkpoints in {self.directory} could not be removed ({error}); "
                "new ones are not affected, but the disk will fill up",
                RuntimeWarning,
                stacklevel=2,
            )
        return tuple(removed)

    def _check_fence(self, what: str) -> None:
        if self._fence is not None:
            self._fence.check(what)
