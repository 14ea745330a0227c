"""What no optimizer changes, such as the base model under a LoRA: written twice, then linked.

It has files of its own. The next checkpoint gives those of the last but one another name (a hard
link) while the values are the same, by a fingerprint that is made of them anew for each save:
libraries change frozen weights for a while, and put back nearly what was there. So each checkpoint
has all its files, any other may be removed, and none shares a file with the one before it, which is
there for the case that it is damaged.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from isal.isal_zlib import crc32

from hydroslurm.checkpoint.checksummed_file import (
    BLOCK_BYTES,
    FileEntry,
    checked_chunks,
    read_checked,
    write_whole,
)
from hydroslurm.checkpoint.host_memory import bytes_of
from hydroslurm.checkpoint.manifest import Checkpoint
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tensor_file import files_of_part, frozen_part, parse
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.errors import CheckpointError

_NO_LINK = (
    errno.EPERM,
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EXDEV,
)
"""What file systems report that make no hard links, or none of this file."""

_NOTED = 8
"""Checkpoints that are remembered: more than are kept."""

_AT_A_TIME = 1 << 22
"""Numbers of eight bytes that an accelerator mixes at a time, with a few copies of them."""


@dataclass(frozen=True, eq=False)
class _Stored:
    """The two files of a rank in a checkpoint, by their names there, and the fingerprint of what is
    frozen."""

    path: Path
    key: tuple[int, int]
    files: dict[str, FileEntry]
    fingerprint: str


class FrozenFiles:
    """Those in the checkpoints of a folder. For one rank, whose threads may share it."""

    def __init__(self, rank: int, storage: Storage) -> None:
        self._names = files_of_part(frozen_part(rank))
        self._storage = storage
        self._noted: tuple[_Stored, ...] = ()
        self._can_link = True

    def note(
        self,
        checkpoint: Checkpoint,
        *,
        files: Mapping[str, FileEntry] | None = None,
        fingerprint: str = "",
    ) -> None:
        """A checkpoint of the folder.

        Args:
            files: in it, this rank's at least; None: those of its manifest, which may be large.
            fingerprint: of what is frozen in it; read where it is not known.
        """
        there = checkpoint.manifest.files if files is None else files
        mine = {name: there[name] for name in self._names if name in there}
        if len(mine) < len(self._names):
            return
        index = self._names[0]
        try:
            if not fingerprint:
                text = read_checked(checkpoint.path / index, mine[index], storage=self._storage)
                fingerprint = str(parse(text)["fingerprint"])
        except (CheckpointError, ValueError, KeyError):
            return
        others = [one for one in self._noted if one.path != checkpoint.path]
        stored = (_Stored(checkpoint.path, checkpoint.key, mine, fingerprint), *others)
        self._noted = tuple(sorted(stored, key=lambda one: one.key, reverse=True)[:_NOTED])

    def have(self, plan: WritePlan) -> bool:
        """Whether there are some that hold what is frozen in a state, and can be linked."""
        return any(True for _ in self._apart(plan))

    def put(
        self, folder: Path, plan: WritePlan, *, cancel: threading.Event | None
    ) -> dict[str, FileEntry]:
        """Put those that hold what is frozen in a state into a folder, as links. Nothing is put
        where it can be written; where it is in no memory any more, it is copied.

        Raises:
            OSError: a call failed. CheckpointCorrupt: one is not what was written. SaveAbandoned:
                ``cancel`` was set.
        """
        sources = list(self._apart(plan))
        if plan.frozen is None:
            sources += [one for one in self._noted[:1] if one.fingerprint == plan.fingerprint]
        for source in sources:
            try:
                for name, entry in source.files.items():
                    if self._link(source, folder, name):
                        continue
                    if plan.frozen is not None:
                        return {}
                    data = checked_chunks(source.path / name, entry, storage=self._storage)
                    write_whole(folder / name, data, storage=self._storage, cancel=cancel)
                return source.files
            except FileNotFoundError:  # somebody has removed that checkpoint
                self._noted = tuple(one for one in self._noted if one is not source)
                for name in source.files:
                    with suppress(FileNotFoundError):
                        self._storage.unlink(folder / name)
        if plan.frozen is None:
            raise FileNotFoundError(errno.ENOENT, "the files of what is frozen are gone")
        return {}

    def _apart(self, plan: WritePlan) -> Iterator[_Stored]:
        """Those that hold what is frozen in a state, and are not the files of the newest
        checkpoint: what damages one of two leaves the other."""
        if not self._can_link or not self._noted:
            return
        newest, *others = self._noted
        taken = _inode(newest)
        for one in others:
            inode = _inode(one)
            if one.fingerprint == plan.fingerprint and inode is not None and inode != taken:
                yield one

    def _link(self, source: _Stored, folder: Path, name: str) -> bool:
        """False where the file system makes no links; raises OSError."""
        try:
            if self._can_link:
                self._storage.link(source.path / name, folder / name)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            self._can_link = False
        return self._can_link


def _inode(stored: _Stored) -> tuple[int, int] | None:
    """Of the tensors; None if they are not there any more."""
    try:
        _, tensors = stored.files
        status = (stored.path / tensors).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def with_fingerprint(plan: WritePlan) -> WritePlan:
    """A plan that has one, if anything in it is frozen."""
    if not plan.frozen or plan.fingerprint:
        return plan
    return replace(plan, fingerprint=fingerprint(plan))


def fingerprint(plan: WritePlan) -> str:
    """Of what is frozen in a state: where it belongs, and all its values.

    On the CPU it is made of the same checksums as those of files, one for each block; on an
    accelerator of a sum of mixed numbers, so that the values need not be copied.
    """
    assert plan.frozen is not None
    laid = plan.laid_frozen
    digest = hashlib.blake2b(laid.chunks, digest_size=16)
    sums: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in (plan.frozen[number].detach() for number in laid.order):
        if tensor.is_cpu:
            data = bytes_of(tensor.contiguous())
            for start in range(0, len(data), BLOCK_BYTES):
                digest.update(crc32(data[start : start + BLOCK_BYTES]).to_bytes(4, "big"))
        else:
            sums.setdefault(tensor.device, []).append(mixed(tensor))
    for of_device in sums.values():
        digest.update(bytes_of(torch.stack(of_device).cpu()))
    return digest.hexdigest()


_GOLDEN, _FIRST, _SECOND = (
    constant - 2**64 for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def mixed(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits of the values of a tensor and their places, as a tensor on its device: the sum,
    modulo 2**64, of what SplitMix64 makes of each eight bytes and their number (Steele, Lea and
    Flood, "Fast splittable pseudorandom number generators", 2014)."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    padded = flat.numel() % 8
    words = flat[: flat.numel() - padded].view(torch.int64)
    rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[:padded] = flat[flat.numel() - padded :]
    total = _mixed(rest.view(torch.int64), first=words.numel())
    for first in range(0, words.numel(), _AT_A_TIME):
        total += _mixed(words[first : first + _AT_A_TIME], first=first)
    return total


def _mixed(words: torch.Tensor, *, first: int) -> torch.Tensor:
    mix = torch.arange(first + 1, first + 1 + words.numel(), device=words.device)
    mix.mul_(_GOLDEN).add_(words)
    mix.bitwise_xor_(_shifted(mix, 30)).mul_(_FIRST)
    mix.bitwise_xor_(_shifted(mix, 27)).mul_(_SECOND)
    return mix.bitwise_xor_(_shifted(mix, 31)).sum()


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, as of numbers without a sign."""
    return (numbers >> by).bitwise_and_((1 << (64 - by)) - 1)
