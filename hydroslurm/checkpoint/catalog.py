"""Which checkpoints a folder has."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.checkpoint import folders, manifest
from hydroslurm.checkpoint.checksummed_file import read_whole
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.errors import CheckpointCorrupt, CheckpointError, UntrustedFile

EPOCH = "epoch"
"""The kind that marks the end of an epoch. A step can have one beside a periodic checkpoint, which
still belongs within the epoch; neither stands in for the other."""

VISIBLE_S = 10.0
"""How long to wait until a manifest that another rank has written is seen here."""


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, by its manifest. One that another rank has committed or chosen has a
    summary of it, without the files. Whether those are good, verifying tells."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def key(self) -> tuple[int, int]:
        """Step, and which save of it: the newer of two checkpoints of a run has the greater one."""
        return folders.key_of(self.path.name) or (self.manifest.step, 1)

    @property
    def epoch(self) -> int:
        return self.manifest.epoch

    @property
    def kind(self) -> str:
        return self.manifest.kind


@dataclass(frozen=True)
class Problem:
    """A folder that has a checkpoint's name, and no manifest that can be read and believed."""

    path: Path
    key: tuple[int, int]
    error: CheckpointError


def look(directory: Path, *, storage: Storage) -> list[Checkpoint | Problem]:
    """Everything that is named like a committed checkpoint, oldest first. Reads manifests only.

    Raises:
        CheckpointError: the folder cannot be listed; one that does not exist is empty.
    """
    try:
        names = storage.listdir(directory)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be listed: {error.strerror}") from error
    keys = sorted((key, name) for name in names if (key := folders.key_of(name)) is not None)
    return [_at(directory / name, key, storage) for key, name in keys]


def read_manifest(path: Path, *, storage: Storage) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        CheckpointCorrupt: gone, unreadable, or not what was written.
        CheckpointTooNew: of a newer schema.
        CheckpointError: somebody else may have written it.
    """
    file = path / manifest.NAME
    try:
        for place in (path, file):
            storage.check_trusted(place)
        data = read_whole(file, storage=storage, limit_bytes=manifest.MOST_BYTES)
        text = data.decode()
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} has no {manifest.NAME}: it was never committed") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointCorrupt(f"{file} cannot be read: {error}") from error
    except UntrustedFile as error:
        raise CheckpointError(str(error)) from error
    return Manifest.from_json(text, where=file)


def as_told(summary: str, path: Path) -> Checkpoint:
    """The checkpoint that another rank has told of by its summary (:meth:`Manifest.summary`),
    unchecked.

    Raises:
        CheckpointCorrupt, CheckpointTooNew, CheckpointTooOld: what was told is no manifest.
    """
    return Checkpoint(path, Manifest.from_json(summary, where=path / manifest.NAME))


def read_again(checkpoint: Checkpoint, *, storage: Storage) -> Manifest:
    """The manifest of a checkpoint as it is on the disk now, with its files.

    What another rank has told of may be seen here late: network file systems take a while to show a
    new file.

    Raises:
        CheckpointCorrupt: it is gone or is another one.
        CheckpointTooNew, CheckpointError: as :func:`read_manifest`.
    """
    known, clock = checkpoint.manifest, AwakeClock()
    give_up_s = clock.now_s() + VISIBLE_S
    while True:
        try:
            found = read_manifest(checkpoint.path, storage=storage)
            if (found if known.files else found.summary()) == known:
                return found
            problem = CheckpointCorrupt(
                f"{checkpoint.path / manifest.NAME} is not the one that was there before"
            )
        except CheckpointCorrupt as error:
            problem = error
        if known.files or clock.now_s() > give_up_s:
            raise problem
        with contextlib.suppress(OSError):  # makes NFS look again
            storage.listdir(checkpoint.path.parent)
        time.sleep(0.05)


def _at(path: Path, key: tuple[int, int], storage: Storage) -> Checkpoint | Problem:
    try:
        found = read_manifest(path, storage=storage)
    except CheckpointError as error:
        return Problem(path, key, error)
    if found.step != key[0]:
        return Problem(
            path, key, CheckpointCorrupt(f"{path} holds step {found.step}: it was renamed")
        )
    return Checkpoint(path, found)
