"""The checkpoints of a run: write, list, verify, load, fall back, retain, copy between tiers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from hydroslurm.checkpoint import commit, folders, manifest, reader, retention
from hydroslurm.checkpoint.catalog import Checkpoint, Problem, look, read_manifest
from hydroslurm.checkpoint.checking import Checker
from hydroslurm.checkpoint.checksummed_file import CHUNK_BYTES, compare, copy_file
from hydroslurm.checkpoint.joint import JointSave
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.pins import Pins
from hydroslurm.checkpoint.save_round import PATIENCE_S, SOLO, Peers, SaveRound
from hydroslurm.checkpoint.storage import LocalStorage, Storage, TimedSyncs
from hydroslurm.checkpoint.write_plan import State, WritePlan, plan_of
from hydroslurm.checkpoint.writer import write_all
from hydroslurm.core.fence import Fence
from hydroslurm.errors import CheckpointError, SaveFailed, UsageError

__all__ = ["Checkpoint", "CheckpointStore", "State"]


class CheckpointStore:
    """One folder of checkpoints. Any number of processes may use one folder at a time, also for the
    same step; one store is used by one thread at a time."""

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
            fence: of the run that it belongs to; a newer attempt of that one ends all writing.
            patience_s: how long :meth:`write` waits for them at each of its agreements.
        """
        self.directory = directory
        self.syncs = TimedSyncs(LocalStorage() if storage is None else storage)
        self._storage = cast("Storage", self.syncs)
        self._peers = SOLO if peers is None or peers.world_size == 1 else peers
        self._rank = self._peers.rank
        self._fence = fence
        self._patience_s = patience_s
        self._chunk_bytes = chunk_bytes
        self._checker = Checker(self._storage)
        self.pins = Pins(self._storage)

    @property
    def peers(self) -> Peers:
        """The ranks that save together; ``SOLO`` for one that saves alone."""
        return self._peers

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
        timeout_s: float | None = None,
        written: Callable[[], None] | None = None,
        again: bool = False,
        least: int = 1,
    ) -> Checkpoint:
        """Save; returns when the checkpoint is committed and durable.

        A step that is committed and whole already is returned as it is, unless it is to be saved
        ``again``, or is the end of an epoch and ``kind`` is another one, or the other way round.
        ``state`` must not change meanwhile. With peers every rank calls it for the same
        step; all of them return, or raise, the same.

        Args:
            state: or what ``write_plan.divide`` has made of it.
            meta: plain JSON values, kept in the manifest; with peers, rank 0's.
            cancel: looked at between chunks; setting it ends the save before its commit.
            topic: of this save in the agreements of the peers, never to be used again; made of the
                step and the kind when None, so that the same save cannot be tried twice.
            timeout_s: instead of the store's ``patience_s``.
            written: called when all that this rank has to write is on the disk, before the commit;
                not where the step is committed already. It must not raise.
            again: the state may have changed since this step was saved: it becomes a checkpoint of
                its own, which is the newer one; the one before stays as it is.
            least: which save of this step it is at least, counted from 1 (:meth:`next_number`); not
                with peers.

        Raises:
            UnsavableState: nothing was written.
            SaveAbandoned: ``cancel`` was set. What was committed before is whole.
            SaveFailed: an I/O call failed, or a rank is gone. What was committed before is whole.
            StaleAttempt: a newer attempt holds the folder of the run. The same.
        """
        begun_s = time.monotonic()
        header = manifest.begun(
            step=step, epoch=epoch, kind=kind, meta=meta or {}, torch_version=torch.__version__
        )
        if self._peers.world_size > 1:
            save_round = SaveRound(
                self._peers,
                topic=f"save/{step}/{kind}" if topic is None else topic,
                step=step,
                timeout_s=self._patience_s if timeout_s is None else timeout_s,
                cancel=cancel,
            )
            save = JointSave(
                self.directory,
                save_round,
                storage=self._storage,
                checker=self._checker,
                chunk_bytes=self._chunk_bytes,
                may_commit=lambda: self._check_fence(f"the save of step {step}"),
                written=written,
                again=again,
            )
            return save.run(state, header)
        plan = plan_of(state, rank=self._rank, world_size=1)

        def fill(folder: Path, hasher: ThreadPoolExecutor) -> Manifest:
            files = write_all(
                folder,
                plan,
                storage=self._storage,
                hasher=hasher,
                cancel=cancel,
                chunk_bytes=self._chunk_bytes,
            )
            if written is not None:
                written()
            return replace(
                header,
                save_s=round(time.monotonic() - begun_s, 6),
                state_bytes=plan.state_bytes,
                files=files,
            )

        return self._commit(step, fill, again=again, kind=kind, least=least)

    def adopt(
        self,
        source: Checkpoint,
        *,
        cancel: threading.Event | None = None,
        written: Callable[[], None] | None = None,
    ) -> Checkpoint:
        """Copy a committed checkpoint of another store into this one, under its name and the same
        promise; ``written`` as in :meth:`write`.

        Raises:
            CheckpointCorrupt: a file of ``source`` is not what was written there.
            SaveAbandoned, SaveFailed, StaleAttempt: as in :meth:`write`.
        """

        def fill(folder: Path, hasher: ThreadPoolExecutor) -> Manifest:
            for name, entry in source.manifest.files.items():
                seen = copy_file(
                    source.path / name,
                    folder / name,
                    storage=self._storage,
                    hasher=hasher,
                    cancel=cancel,
                    chunk_bytes=self._chunk_bytes,
                )
                compare(source.path / name, entry, seen)
            if written is not None:
                written()
            return source.manifest

        step, number = source.key
        return self._commit(step, fill, again=False, least=number)

    def next_number(self, step: int) -> int:
        """Which save of this step the next one would be, counted from 1; 1 also where the folder
        cannot be listed."""
        with suppress(OSError):
            return self._checker.newest_number(self.directory, step) + 1
        return 1

    def look(self) -> list[Checkpoint | Problem]:
        """Everything that is named like a checkpoint, oldest first. Reads the manifests only."""
        return look(self.directory, storage=self._storage)

    def committed(self) -> tuple[Checkpoint, ...]:
        """All that are there, oldest first. Reads the manifests only; see :meth:`problems`."""
        return tuple(one for one in self.look() if isinstance(one, Checkpoint))

    def problems(self) -> Mapping[Path, CheckpointError]:
        """Folders named like a checkpoint that have no manifest that can be read."""
        return {one.path: one.error for one in self.look() if isinstance(one, Problem)}

    @property
    def checker(self) -> Checker:
        """Verifies, and remembers what was good; for verifying as several ranks."""
        return self._checker

    def verify(self, checkpoint: Checkpoint, *, cancel: threading.Event | None = None) -> None:
        """Read all of it and compare with what was written.

        Raises:
            CheckpointCorrupt: names the first file that is not, with what was wanted and seen.
            CheckpointTooNew: its manifest is one from the future by now.
            SaveAbandoned: ``cancel`` was set.
        """
        self.pins.pin(checkpoint.path)
        self._checker.verify(checkpoint, cancel=cancel)

    def glance(self, checkpoint: Checkpoint) -> None:
        """Compare the sizes of its files only; CheckpointCorrupt names one that differs."""
        self._checker.glance(checkpoint)

    def load(
        self,
        checkpoint: Checkpoint,
        *,
        only: Collection[str] | None = None,
        verify: bool = True,
        like: Mapping[str, Any] | None = None,
    ) -> State:
        """Read a state; its tensors are on the CPU and the caller's own.

        The number of ranks that have saved it need not be that of now. Its ``own`` is what the rank
        of the same number had; nothing for one that had no part in the save.

        Args:
            only: names of ``shared`` and ``own`` to read; all of them when None.
            verify: compare the files with the manifest first. False for one that was just verified.
            like: name -> what says how to lay tensors out over the ranks of now: see ``reshard``.
                Without a DTensor there a tensor comes back whole.

        Raises:
            CheckpointCorrupt: a file is not what was written.
            CheckpointMissing: there is nothing of a name in ``only``; says what there is.
        """
        with self.pins.holding():
            self.pins.pin(checkpoint.path)
            if verify:
                self.verify(checkpoint)
            return reader.read_state(
                checkpoint.path,
                checkpoint.manifest.files,
                storage=self._storage,
                rank=self._rank,
                only=only,
                like=like,
            )

    def load_own(self, checkpoint: Checkpoint, rank: int) -> Mapping[str, Any]:
        """What was one saved rank's own; verifies nothing.

        Raises:
            CheckpointMissing: no such rank had a part in the save.
            CheckpointCorrupt: a file is not what was written.
        """
        return reader.read_own(
            checkpoint.path, checkpoint.manifest.files, storage=self._storage, rank=rank
        )

    def revoke_others(self) -> None:
        """End all saves of other processes: see ``commit.revoke``. For an attempt that has claimed
        the run's folder.

        Raises:
            SaveFailed: one of their folders cannot be taken away.
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
        """Remove older checkpoints, and what killed saves left. To be called after a commit.

        ``keep_stop`` of kind "stop" stay, ``keep_epochs`` of kind "epoch" (None: all of them) and
        ``keep`` of the other kinds; at least two in all, and the newest good one whatever its age.
        A failure costs a RuntimeWarning.

        Returns:
            The checkpoints that were removed. With peers only rank 0 removes any.
        """
        if keep < 1 or keep_stop < 0:
            raise UsageError(f"keep={keep}, keep_stop={keep_stop}: at least 1 and 0 are wanted")
        if keep_epochs is not None and keep_epochs < 1:
            raise UsageError(f"keep_epochs={keep_epochs}: wanted 1 or more, or None for all")
        if self._rank != 0:
            return ()
        return retention.prune(
            self.directory,
            keep=keep,
            keep_stop=keep_stop,
            keep_epochs=keep_epochs,
            checker=self._checker,
            may_prune=lambda: self._check_fence(f"removing old checkpoints of {self.directory}"),
            storage=self._storage,
        )

    def _check_fence(self, what: str) -> None:
        if self._fence is not None:
            self._fence.check(what)

    def _commit(
        self,
        step: int,
        fill: Callable[[Path, ThreadPoolExecutor], Manifest],
        *,
        again: bool,
        least: int,
        kind: str | None = None,
    ) -> Checkpoint:
        what = f"the save of step {step}"
        with self._failing_as_save(step):
            self._check_fence(what)
            target, there = self._checker.place_for(
                self.directory, step, again=again, kind=kind, least=least
            )
            if there is not None:
                # who committed it may have been killed before its last call
                self._storage.fsync_dir(self.directory)
                return there
            written = commit.commit(
                target,
                temporary=folders.temporary(target),
                fill=fill,
                is_whole=lambda: self._checker.good_at(target) is not None,
                may_commit=lambda: self._check_fence(what),
                storage=self._storage,
            )
            done = Checkpoint(target, written or read_manifest(target, storage=self._storage))
        self._checker.trust(done)
        return done

    @contextmanager
    def _failing_as_save(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with suppress(OSError):  # a newer attempt takes the folders of our saves away
                self._check_fence(f"the save of step {step}")
            where = f" ({error.filename})" if error.filename else ""
            raise SaveFailed(
                f"step {step} could not be saved to {self.directory}: "
                f"{error.strerror or error}{where}. Checkpoints that were committed before are "
                "whole"
            ) from error
