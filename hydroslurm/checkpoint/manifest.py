"""The commit marker of a checkpoint: what belongs to it, who wrote it, and which ones a folder has.

``manifest.json`` is one object. Its last entry, ``checksum``, covers everything before it. That
holds for every future schema, so that a damaged manifest can be told from one of a newer release.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import socket
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.checksummed_file import FileEntry, Word, read_whole
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.decoding import Count, Seconds
from hydroslurm.core.files import check_depth, clean, decode_json
from hydroslurm.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointTooNew,
    CheckpointTooOld,
    UntrustedFile,
    UsageError,
)

SCHEMA = 3
"""Of the manifest and of everything that it names. 1 kept tensors in torch's DCP format; 2 had no
files of what is frozen."""

NAME = "manifest.json"
MOST_BYTES = 64 << 20
"""Of the text: two files each of a hundred thousand ranks take a third of it."""

MOST_DEPTH = 200
_META_BYTES, _META_DEPTH = MOST_BYTES // 16, MOST_DEPTH - 10
"""Of ``meta``, which the caller provides: what is written can be read."""

ALGORITHM: Literal["crc32"] = "crc32"
"""Of all checksums: zlib's, 8 hexadecimal digits; of files with several blocks that of their
checksums (``checksummed_file.checksum_of``). It detects every burst error of up to 32 bits and
misses one in 2**32 others. Chosen by measurement: 4.3 GB/s on one core, so that a second thread
hides it behind the writing; SHA-256 took as long as the disk on CPUs with instructions for it, and
four times as long on others. It protects checkpoints from decay, not from attackers: a forged one
is harmless because nothing in it is ever executed."""

EPOCH = "epoch"
"""The kind that marks the end of an epoch. A step can have one beside a periodic checkpoint, which
still belongs within the epoch; neither stands in for the other."""

VISIBLE_S = 10.0
"""How long to wait until a manifest that another rank has written is seen here."""


@dataclass(frozen=True)
class WrittenBy:
    """Who wrote a checkpoint, and with what. For people; nothing depends on it."""

    job_id: int | None = None
    restart_count: int = 0
    host: str = ""
    python: str = ""
    torch: str = ""
    hydroslurm: str = ""
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What a committed checkpoint says about itself.

    Attributes:
        step: training steps completed. epoch: as the run counts them.
        kind: "periodic", "stop", "manual" or "epoch".
        created_epoch_ns: when the save began. save_s: from then until all parts were on the disk.
        state_bytes: of all tensors, as they are in memory.
        files: name in the folder -> its entry; all but the manifest itself.
        meta: the caller's own, plain JSON values.
    """

    step: Count
    epoch: Count
    kind: Word
    created_epoch_ns: Count
    save_s: Seconds
    state_bytes: Count
    files: Mapping[str, FileEntry]
    world_size: Count = 1
    algorithm: Literal["crc32"] = ALGORITHM
    written_by: WrittenBy = field(default_factory=WrittenBy)
    meta: Mapping[str, Any] = field(default_factory=dict)
    schema: Count = SCHEMA

    @property
    def size_bytes(self) -> int:
        """Of all files together, on the disk."""
        return sum(entry.size_bytes for entry in self.files.values())

    def to_json(self) -> str:
        """The text of the file."""
        text = json.dumps({"schema": self.schema, **asdict(self)}, indent=1, allow_nan=False)
        text = text.removesuffix("\n}")
        return text + _SUM.format(checksum(f"{text}{_END}".encode()))

    def summary(self) -> Manifest:
        """Without the files: with thousands of ranks they are megabytes, which few ranks need."""
        return replace(self, files={})

    @classmethod
    def from_json(cls, text: str, *, where: Path) -> Manifest:
        """Read the text of a file; ``where`` is for the messages.

        Raises:
            CheckpointTooNew, CheckpointTooOld: another schema; names both versions.
            CheckpointCorrupt: anything but what was written.
        """
        try:
            body = decode_json(text, max_depth=MOST_DEPTH)
            sealed = msgspec.convert(body, _Sealed)
            schema, writer = sealed.schema, clean(sealed.written_by.hydroslurm)
            covered = text.removesuffix(_SUM.format(sealed.checksum))
            seen = checksum(f"{covered}{_END}".encode())
        except ValueError as error:
            raise CheckpointCorrupt(
                f"{where} cannot be read ({type(error).__name__}: {error})"
            ) from error
        if schema > SCHEMA:
            raise CheckpointTooNew(
                f"{where} is of schema {schema}, written by hydroslurm {writer}; hydroslurm "
                f"{_version()} reads up to schema {SCHEMA}. Install hydroslurm {writer} or newer"
            )
        if seen != sealed.checksum or covered == text:
            raise CheckpointCorrupt(
                f"{where}: checksum {sealed.checksum!r} was written, {seen!r} is there"
            )
        if schema < SCHEMA:
            raise CheckpointTooOld(
                f"{where} is of schema {schema}, written by hydroslurm {writer}; hydroslurm "
                f"{_version()} reads schema {SCHEMA} and newer. Finish the run with {writer}, or "
                "export it there: hydroslurm checkpoint export RUN --out model.pt"
            )
        try:
            found = msgspec.convert(body, cls)
        except ValueError as error:
            message = clean(str(error))
            raise CheckpointCorrupt(f"{where} lacks what a manifest has: {message}") from error
        for name in found.files:
            if not folders.is_file_name(name):
                raise CheckpointCorrupt(
                    f"{where}: files of a checkpoint lie in its folder, not at {name!r:.200}"
                )
        return found


@dataclass(frozen=True)
class _Writer:
    hydroslurm: str


@dataclass(frozen=True)
class _Sealed:
    """What the manifest of any schema has."""

    schema: Count
    written_by: _Writer
    checksum: Word


def checksum(data: bytes) -> str:
    """The checksum of some bytes, as manifests have it."""
    return f"{zlib.crc32(data):08x}"


def begun(
    *,
    step: int,
    epoch: int,
    kind: str,
    meta: Mapping[str, Any],
    world_size: int = 1,
) -> Manifest:
    """The manifest of a save by this process that has not written any files yet.

    Raises:
        UsageError: ``meta`` holds what JSON cannot express, or what no reader would take.
    """
    try:
        text = json.dumps(dict(meta), allow_nan=False)
        check_depth(text, max_depth=_META_DEPTH)
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"meta must hold plain JSON values: {error}") from error
    if len(text) > _META_BYTES:
        raise UsageError(
            f"meta has {len(text):,} bytes as JSON, and {_META_BYTES:,} are the most. Save large "
            "things as part of the state"
        )
    return Manifest(
        step=step,
        epoch=epoch,
        kind=kind,
        created_epoch_ns=time.time_ns(),
        save_s=0.0,
        state_bytes=0,
        files={},
        world_size=world_size,
        written_by=_this_process(),
        meta=plain,
    )


@functools.lru_cache(maxsize=1)
def _this_process() -> WrittenBy:
    """This process, as it was at its first save."""
    job_id = os.environ.get("SLURM_JOB_ID", "")
    restarts = os.environ.get("SLURM_RESTART_COUNT", "")
    return WrittenBy(
        job_id=int(job_id) if job_id.isdecimal() else None,
        restart_count=int(restarts) if restarts.isdecimal() else 0,
        host=socket.gethostname(),
        python=platform.python_version(),
        torch=_version("torch"),
        hydroslurm=_version(),
        argv=tuple(sys.argv),
    )


def _version(package: str = "hydroslurm") -> str:
    """Of a package that is loaded."""
    return str(sys.modules[package].__version__)


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


def read_manifest(path: Path, *, storage: Storage) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        CheckpointCorrupt: gone, unreadable, or not what was written.
        CheckpointTooNew: of a newer schema.
        CheckpointError: somebody else may have written it.
    """
    file = path / NAME
    try:
        for place in (path, file):
            storage.check_trusted(place)
        data = read_whole(file, storage=storage, limit_bytes=MOST_BYTES)
        text = data.decode()
    except FileNotFoundError as error:
        raise CheckpointCorrupt(f"{path} has no {NAME}: it was never committed") from error
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
    return Checkpoint(path, Manifest.from_json(summary, where=path / NAME))


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
                f"{checkpoint.path / NAME} is not the one that was there before"
            )
        except CheckpointCorrupt as error:
            problem = error
        if known.files or clock.now_s() > give_up_s:
            raise problem
        with contextlib.suppress(OSError):  # makes NFS look again
            storage.listdir(checkpoint.path.parent)
        time.sleep(0.05)


_END, _SUM = "\n}\n", ',\n "checksum": "{}"\n}}\n'
"""The end of what the checksum covers, and what takes its place in the file. The bytes of the file
are checked and not encoded again: of 4,096 ranks that would take longer than all the rest."""
