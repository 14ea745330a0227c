"""What one rank writes of a state: its shards in torch's distributed checkpoint format (DCP).

shared.json       what all ranks share, tensors as references; rank 0 writes it
rank-00000.json   what only that rank has
__0_0.distcp      that rank's shards: one ``torch.save`` each, one after the other
part-00000.json   of several ranks: the files that a rank has written, and where its shards are
.metadata         DCP's index of all shards

One rank writes the same as many, except for ``part-*.json``, which let any rank write the index.
DCP's own FileSystemWriter is not used: it does not checksum, cannot be cancelled, and computes a
CRC of every tensor while it holds the GIL, which would stall the training meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from threading import Event
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo

from hydroslurm.checkpoint.checksummed_file import CHUNK_BYTES, ChecksummedFile, write_whole
from hydroslurm.checkpoint.manifest import FileEntry, file_entries
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tree import JsonValue
from hydroslurm.checkpoint.write_plan import Shard, WritePlan
from hydroslurm.core.files import parse_json
from hydroslurm.errors import CheckpointCorrupt

METADATA = ".metadata"
"""DCP's own name for its index."""

SHARED_JSON = "shared.json"


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor, and where it is in its rank's file.

    Attributes:
        key: of the whole tensor. shape: of the whole tensor. dtype: its name without ``torch.``.
        offsets, sizes: of the piece inside the whole.
        at_bytes, length_bytes: inside the file.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    at_bytes: int
    length_bytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return cast("torch.dtype", getattr(torch, self.dtype))

    @property
    def value_bytes(self) -> int:
        """Of the values, as they are in memory."""
        return math.prod(self.sizes) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class PartIndex:
    """What one rank has written."""

    rank: int
    files: Mapping[str, FileEntry]
    chunks: tuple[Chunk, ...]

    def to_json(self) -> str:
        """The text of the file."""
        files = {name: asdict(entry) for name, entry in self.files.items()}
        chunks = [astuple(chunk) for chunk in self.chunks]
        return json.dumps({"rank": self.rank, "files": files, "chunks": chunks})

    @classmethod
    def from_json(cls, text: bytes, *, where: Path) -> PartIndex:
        """Read the text of a file; CheckpointCorrupt with ``where`` when it is no such text."""
        try:
            body = parse_json(text)
            return cls(
                rank=int(body["rank"]),
                files=file_entries(body["files"]),
                chunks=tuple(_chunk(*one) for one in body["chunks"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{where} cannot be read: {error}") from error


def _chunk(
    key: Any, shape: Any, dtype: Any, offsets: Any, sizes: Any, at_bytes: Any, length_bytes: Any
) -> Chunk:
    """Raises TypeError or ValueError: it is none."""
    chunk = Chunk(key, tuple(shape), dtype, tuple(offsets), tuple(sizes), at_bytes, length_bytes)
    numbers = (*chunk.shape, *chunk.offsets, *chunk.sizes, at_bytes, length_bytes)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a piece of {key!r} lies at {numbers}")
    if not isinstance(key, str) or not isinstance(chunk.torch_dtype, torch.dtype):
        raise TypeError(f"{key!r} is a tensor of {dtype!r}")
    if len({len(chunk.shape), len(chunk.offsets), len(chunk.sizes)}) != 1 or any(
        at + size > whole
        for at, size, whole in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
    ):
        raise ValueError(f"a piece of {key!r} lies outside of it: {numbers}")
    return chunk


def own_json(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def part_json(rank: int) -> str:
    return f"part-{rank:05d}.json"


def tensors_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def write_part(
    folder: Path,
    plan: WritePlan,
    *,
    storage: Storage,
    cancel: Event | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> PartIndex:
    """Write and fsync what is this rank's into an existing folder.

    Raises:
        OSError: a call failed. SaveAbandoned: ``cancel`` was set.
    """
    files: dict[str, FileEntry] = {}
    name = tensors_file(plan.rank)
    part = ChecksummedFile(folder / name, storage=storage, cancel=cancel, chunk_bytes=chunk_bytes)
    try:
        with _without_zip_crc():
            chunks = tuple(_write_shard(part, shard) for shard in plan.shards)
        files[name] = part.finish()
    finally:
        part.abandon()
    texts: dict[str, JsonValue] = {own_json(plan.rank): dict(plan.own)}
    if plan.rank == 0:
        texts[SHARED_JSON] = dict(plan.shared)
    for name, encoded in texts.items():
        text = json.dumps(encoded, allow_nan=False, separators=(",", ":"))
        files[name] = write_whole(folder / name, text.encode(), storage=storage)
    return PartIndex(plan.rank, files, chunks)


def write_index(folder: Path, index: PartIndex, *, storage: Storage) -> FileEntry:
    """Write and fsync the index of a part for the rank that commits; raises OSError.

    Returns:
        The entry of that file, through which all others can be verified.
    """
    path = folder / part_json(index.rank)
    entry = write_whole(path, index.to_json().encode(), storage=storage)
    storage.fsync_dir(folder)
    return entry


def metadata_of(indexes: Iterable[PartIndex]) -> dcp.Metadata:
    """DCP's index of all parts; of pieces that two ranks have written, the first.

    Raises:
        CheckpointCorrupt: the pieces of a tensor do not make up the whole.
    """
    tensors: dict[str, dcp.TensorStorageMetadata] = {}
    places: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for index in indexes:
        for chunk in index.chunks:
            found = tensors.setdefault(
                chunk.key,
                dcp.TensorStorageMetadata(
                    properties=dcp.TensorProperties(dtype=chunk.torch_dtype),
                    size=torch.Size(chunk.shape),
                    chunks=[],
                ),
            )
            at = dcp.MetadataIndex(chunk.key, chunk.offsets, len(found.chunks))
            if at in places:
                continue
            box = dcp.ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
            found.chunks.append(box)
            places[at] = _StorageInfo(tensors_file(index.rank), chunk.at_bytes, chunk.length_bytes)
    _check_whole(tensors)
    metadata = dcp.Metadata(dict(tensors), storage_data=places)
    metadata.version = CURRENT_DCP_VERSION
    return metadata


def pickled(metadata: dcp.Metadata) -> bytes:
    """DCP's index as bytes, which depend on the parts only."""
    return pickle.dumps(metadata)


def _write_shard(part: ChecksummedFile, shard: Shard) -> Chunk:
    at_bytes = part.tell()
    torch.save(_compact(shard.tensor), cast("IO[bytes]", part))
    part.check()
    return Chunk(
        key=shard.key,
        shape=shard.shape,
        dtype=str(shard.tensor.dtype).removeprefix("torch."),
        offsets=shard.offsets,
        sizes=tuple(shard.tensor.shape),
        at_bytes=at_bytes,
        length_bytes=part.tell() - at_bytes,
    )


def _check_whole(tensors: Mapping[str, dcp.TensorStorageMetadata]) -> None:
    for key, found in tensors.items():
        seen = sum(math.prod(chunk.sizes) for chunk in found.chunks)
        if seen != math.prod(found.size):
            raise CheckpointCorrupt(
                f"the ranks have written {seen} values of {key}, which has "
                f"{math.prod(found.size)}: they do not hold the same tensor. Is it laid out over "
                "one mesh of all ranks?"
            )


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, with a storage of its own: torch.save writes the whole storage behind a view."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()


@contextlib.contextmanager
def _without_zip_crc() -> Iterator[None]:
    """Skip torch's own CRC, which torch.load never checks.

    The setting is per thread in torch 2.13; in older releases a concurrent torch.save of another
    thread goes without it too. Before 2.6 there is no setting.
    """
    try:
        from torch.serialization import get_crc32_options, set_crc32_options
    except ImportError:
        yield
        return
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
