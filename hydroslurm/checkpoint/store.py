"""The checkpoints of a run: write, list, verify, load, fall back, retain, copy between tiers."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from hydroslurm.checkpoint import commit, contents, folders, manifest
from hydroslurm.checkpoint.catalog import Checkpoint, Problem, beyond, look, read_manifest
from hydroslurm.checkpoint.checking import Checker
from hydroslurm.checkpoint.contents import State
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.parts import CHUNK_BYTES, compare
from hydroslurm.checkpoint.storage import LocalStorage, Storage
from hydroslurm.errors import CheckpointCorrupt, CheckpointError, SaveFailed, UsageError

__all__ = ["Checkpoint", "CheckpointStore", "State"]


class CheckpointStore:
    """One folder of checkpoints. Any number of processes may use one folder at a time, also for the
    same step; one store is used by one thread at a time."""

    def __init__(
        self,
        directory: Path,
        *,
        storage: Storage | None = None,
        rank: int = 0,
        world_size: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Touches no disk; the first save makes the folder."""
        self.directory = directory
        self._storage = LocalStorage() if storage is None else storage
        self._rank = rank
        self._world_size = world_size
        self._chunk_bytes = chunk_bytes
        self._checker = Checker(self._storage)

    def write(
        self,
        state: State,
        *,
        step: int,
        epoch: int = 0,
        kind: str,
        meta: Mapping[str, Any] | None = None,
        cancel: threading.Event | None = None,
    ) -> Checkpoint:
        """Save; returns when the checkpoint is committed and durable.

        A step that is committed and whole already is returned as it is. ``state`` must not change
        meanwhile.

        Args:
            meta: plain JSON values, kept in the manifest.
            cancel: looked at between chunks; setting it ends the save before its commit.

        Raises:
            UnsavableState: nothing was written.
            SaveAbandoned: ``cancel`` was set. What was committed before is whole.
            SaveFailed: an I/O call failed. What was committed before is whole.
        """
        begun_s = time.monotonic()
        if self._world_size != 1:
            raise UsageError(f"world_size={self._world_size}: only one rank can save so far")
        parts = contents.split_state(state, rank=self._rank)
        kept = _plain_json(meta or {})

        def fill(folder: Path, hasher: ThreadPoolExecutor) -> Manifest:
            files = contents.write_contents(
                folder,
                parts,
                storage=self._storage,
                hasher=hasher,
                cancel=cancel,
                chunk_bytes=self._chunk_bytes,
            )
            return Manifest(
                step=step,
                epoch=epoch,
                kind=kind,
                created_epoch_ns=time.time_ns(),
                save_s=round(time.monotonic() - begun_s, 6),
                state_bytes=parts.state_bytes,
                files=files,
                world_size=self._world_size,
                written_by=manifest.this_process(torch_version=str(torch.__version__)),
                meta=kept,
            )

        return self._commit(step, fill)

    def adopt(self, source: Checkpoint, *, cancel: threading.Event | None = None) -> Checkpoint:
        """Copy a committed checkpoint of another store into this one, under the same promise.

        Raises:
            CheckpointCorrupt: a file of ``source`` is not what was written there.
            SaveAbandoned, SaveFailed: as in :meth:`write`.
        """

        def fill(folder: Path, hasher: ThreadPoolExecutor) -> Manifest:
            for name, entry in source.manifest.files.items():
                seen = contents.copy_file(
                    source.path / name,
                    folder / name,
                    storage=self._storage,
                    hasher=hasher,
                    cancel=cancel,
                    chunk_bytes=self._chunk_bytes,
                )
                compare(source.path / name, entry, seen)
            return source.manifest

        return self._commit(source.step, fill)

    def committed(self) -> tuple[Checkpoint, ...]:
        """All that are there, oldest first. Reads the manifests only; see :meth:`problems`."""
        return tuple(
            one
            for one in look(self.directory, storage=self._storage)
            if isinstance(one, Checkpoint)
        )

    def problems(self) -> Mapping[Path, CheckpointError]:
        """Folders named like a checkpoint that have no manifest that can be read."""
        return {
            one.path: one.error
            for one in look(self.directory, storage=self._storage)
            if isinstance(one, Problem)
        }

    def verify(self, checkpoint: Checkpoint, *, cancel: threading.Event | None = None) -> None:
        """Read all of it and compare with what was written.

        Raises:
            CheckpointCorrupt: names the first file that is not, with what was wanted and seen.
            CheckpointTooNew: its manifest is one from the future by now.
            SaveAbandoned: ``cancel`` was set.
        """
        self._checker.verify(checkpoint, cancel=cancel)

    def glance(self, checkpoint: Checkpoint) -> None:
        """Compare the sizes of its files only; CheckpointCorrupt names one that differs."""
        self._checker.glance(checkpoint)

    def load(
        self, checkpoint: Checkpoint, *, only: Collection[str] | None = None, verify: bool = True
    ) -> State:
        """Read a state; its tensors are on the CPU and the caller's own.

        Args:
            only: names of ``shared`` and ``own`` to read; all of them when None.
            verify: compare the files with the manifest first. False for one that was just verified.

        Raises:
            CheckpointCorrupt: a file is not what was written.
            CheckpointMissing: there is nothing of a name in ``only``; says what there is.
        """
        if verify:
            self.verify(checkpoint)
        return contents.read_contents(
            checkpoint.path,
            checkpoint.manifest.files,
            storage=self._storage,
            rank=self._rank,
            only=only,
        )

    def newest_good(self) -> Checkpoint | None:
        """The newest that verifies; None when there is none at all.

        Falls back to older ones with one RuntimeWarning that names what was passed over and why.

        Raises:
            CheckpointCorrupt: there are some, and none is good: starting over must be a decision.
        """
        passed: list[CheckpointError] = []
        for one in reversed(look(self.directory, storage=self._storage)):
            try:
                if isinstance(one, Problem):
                    raise one.error
                self.verify(one)
            except CheckpointError as error:
                if self._is_there(one.path):  # else: retired by another process meanwhile
                    passed.append(error)
                continue
            if passed:
                _warn_of_fallback(passed, one)
            return one
        if not passed:
            return None
        raise CheckpointCorrupt(
            f"no checkpoint in {self.directory} can be loaded: {_joined(passed)}. To start "
            "from the beginning, move that folder away"
        )

    def prune(self, *, keep: int, keep_stop: int = 2) -> tuple[Path, ...]:
        """Remove older checkpoints, and what killed saves left. To be called after a commit.

        ``keep`` of all kinds but "stop" and ``keep_stop`` of that one stay; at least two in all,
        and the newest good one whatever its age. A failure costs a RuntimeWarning.

        Returns:
            The checkpoints that were removed.
        """
        if keep < 1 or keep_stop < 0:
            raise UsageError(f"keep={keep}, keep_stop={keep_stop}: at least 1 and 0 are wanted")
        removed: list[Path] = []
        try:
            for one in self._dispensable(keep=keep, keep_stop=keep_stop):
                commit.remove(one.path, storage=self._storage)
                removed.append(one.path)
            commit.remove_leftovers(self.directory, storage=self._storage)
        except (OSError, CheckpointError) as error:
            warnings.warn(
                f"hydroslurm: old checkpoints in {self.directory} could not be removed ({error}); "
                "new ones are not affected, but the disk will fill up",
                RuntimeWarning,
                stacklevel=2,
            )
        return tuple(removed)

    def _is_there(self, path: Path) -> bool:
        with suppress(OSError):
            return path.name in self._storage.listdir(path.parent)
        return True

    def _commit(
        self, step: int, fill: Callable[[Path, ThreadPoolExecutor], Manifest]
    ) -> Checkpoint:
        target = folders.of_step(self.directory, step)
        with self._failing_as_save(step):
            there = self._whole_at(target)
            if there is not None:
                # who committed it may have been killed before its last call
                self._storage.fsync_dir(self.directory)
                return there
            written = commit.commit(
                target,
                temporary=folders.temporary(self.directory, step),
                fill=fill,
                is_whole=lambda: self._whole_at(target) is not None,
                storage=self._storage,
            )
            done = Checkpoint(target, written or read_manifest(target, storage=self._storage))
        self._checker.trust(done)
        return done

    def _whole_at(self, target: Path) -> Checkpoint | None:
        """The checkpoint of that name, if there is one and it is good."""
        try:
            found = Checkpoint(target, read_manifest(target, storage=self._storage))
        except CheckpointError:
            return None
        return found if self._checker.is_good(found) else None

    @contextmanager
    def _failing_as_save(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise SaveFailed(
                f"step {step} could not be saved to {self.directory}: "
                f"{error.strerror or error}{where}. Checkpoints that were committed before are "
                "whole"
            ) from error

    def _dispensable(self, *, keep: int, keep_stop: int) -> list[Checkpoint]:
        found = self.committed()
        rest = beyond(found, keep=keep, keep_stop=keep_stop)
        for one in reversed(found):
            if self._checker.is_good(one):
                return [other for other in rest if other != one]
        return []


def _plain_json(meta: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(meta), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"meta must hold plain JSON values: {error}") from error
    return plain


def _warn_of_fallback(passed: Sequence[CheckpointError], taken: Checkpoint) -> None:
    warnings.warn(
        f"hydroslurm: passed over what cannot be loaded: {_joined(passed)}; going back to "
        f"{taken.path} (step {taken.step})",
        RuntimeWarning,
        stacklevel=3,
    )


def _joined(errors: Sequence[CheckpointError]) -> str:
    return "; ".join(map(str, errors))
