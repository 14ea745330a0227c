"""The tensors of one rank in one .safetensors file, and the index that says which they are.

The file begins with the length of its header in eight bytes, then the header in JSON, then the
values, in C order and native (little-endian) bytes, back to back: any program that reads
.safetensors can open it. The index repeats what the header says, and adds where each piece lies in
its whole tensor, and the checksums of the file's blocks.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch

from hydroslurm.checkpoint.checksummed_file import BLOCK_BYTES, FileEntry, checksum_of
from hydroslurm.checkpoint.tree import JsonValue
from hydroslurm.core.decoding import Count
from hydroslurm.core.files import decode_json
from hydroslurm.errors import CheckpointCorrupt

SHARED_JSON = "shared.json"
"""What all ranks share, without its tensors."""

ALIGN_BYTES = 64
"""Of the first value in a file, for those who map it into memory. The tensors follow in the order
of the size of their elements, so that each of them is aligned for its type without gaps, which the
format forbids."""

_MOST_JSON_DEPTH = 1000
"""Of a tree of state: ``tree.MOST_DEPTH`` containers, of several levels each."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    **{
        getattr(torch, name): known
        for name, known in (
            ("uint16", "U16"),
            ("uint32", "U32"),
            ("uint64", "U64"),
            ("float8_e4m3fn", "F8_E4M3"),
            ("float8_e5m2", "F8_E5M2"),
        )
        if hasattr(torch, name)
    },
}
"""The types that every reader of the format knows. The others stand in the header as bytes."""

_DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
"""By the name that an index has."""

DTYPE_NAMES = {one: str(one).removeprefix("torch.") for one in _DTYPES.values()}
"""As an index has them."""

Crc = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Chunk(NamedTuple):
    """A piece of a tensor, a box inside it, and where it is in its rank's file.

    Attributes:
        key: of the whole tensor. shape: of the whole tensor. dtype: its name without ``torch.``.
        offsets, sizes: of the piece inside the whole.
        at_bytes: of its first value, from the beginning of the file; 0 until it has a place there.
    """

    key: str
    shape: tuple[Count, ...]
    dtype: str
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]
    at_bytes: Count = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return math.prod(self.sizes) * self.torch_dtype.itemsize


class Laid(NamedTuple):
    """How pieces lie in a file.

    Attributes:
        header: the beginning of the file. order: the numbers of the pieces that follow it.
        chunks: those of the index, as JSON.
    """

    header: bytes
    order: list[int]
    chunks: bytes


@dataclass(frozen=True)
class PartIndex:
    """What one rank has written, into one file.

    Attributes:
        rank: the number of the part, a rank or :func:`frozen_part` of one.
        own: what only this rank has, tensors as references.
        chunks: in the order of the file of tensors, none of them inside another.
        blocks: the checksums of that file's blocks.
        fingerprint: of what is frozen; empty for other parts.
    """

    rank: int
    own: dict[str, Any]
    chunks: tuple[Chunk, ...]
    blocks: tuple[Crc, ...]
    fingerprint: str = ""

    @classmethod
    def from_json(cls, text: bytes, *, where: Path, rank: int, tensors: FileEntry) -> PartIndex:
        """Read the text of a file.

        Args:
            rank: the number of the part whose index it must be.
            tensors: the entry of the file of tensors, in which all chunks must lie.

        Raises:
            CheckpointCorrupt: it is no such text; names ``where``.
        """
        try:
            index = msgspec.convert(parse(text), cls)
            if index.rank != rank:
                raise ValueError(f"it is of rank {index.rank}")
            _require_inside(index, tensors)
        except ValueError as error:
            raise CheckpointCorrupt(f"{where} cannot be read: {error!s:.200}") from error
        return index


def frozen_part(rank: int) -> int:
    """The number of a rank's part with what is frozen. The part with all the rest has the rank's
    own."""
    return -1 - rank


def is_frozen_part(number: int) -> bool:
    return number < 0


def files_of_part(number: int) -> tuple[str, str]:
    """The names of its index and of its tensors."""
    rank, word = (frozen_part(number), "frozen") if is_frozen_part(number) else (number, "part")
    return f"{word}-{rank:05d}.json", f"{word}-{rank:05d}.safetensors"


_INDEX = re.compile(r"(part|frozen)-([0-9]{5,9})\.json")


def parts_among(names: Iterable[str]) -> list[int]:
    """The numbers of the parts whose indexes are among these files, sorted."""
    found = (_INDEX.fullmatch(name) for name in names)
    return sorted(
        int(match[2]) if match[1] == "part" else frozen_part(int(match[2]))
        for match in found
        if match
    )


def parse(text: bytes) -> dict[str, Any]:
    """One JSON object.

    Raises:
        ValueError: it is none, or is nested too deeply.
    """
    found = decode_json(text, max_depth=_MOST_JSON_DEPTH)
    if not isinstance(found, dict):
        raise ValueError(f"it holds no names, but a {type(found).__name__}")
    return found


def lay_out(pieces: Sequence[Chunk], *, rank: int) -> Laid:
    """How pieces lie in a rank's file: by the size of their elements."""
    order = sorted(range(len(pieces)), key=lambda place: -pieces[place].torch_dtype.itemsize)
    said = "a part of a checkpoint of hydroslurm: its .json says where each piece belongs"
    about = {"format": "pt", "rank": str(rank), "about": said}
    header: dict[str, Any] = {"__metadata__": about}
    end, chunks = 0, list[Chunk]()
    for piece in (pieces[place] for place in order):
        chunks.append(piece._replace(at_bytes=end))
        begin, end = end, end + piece.size_bytes
        known = _NAMES.get(piece.torch_dtype)
        header[piece.key] = {
            "dtype": known or "U8",
            "shape": piece.sizes if known else (end - begin,),
            "data_offsets": (begin, end),
        }
    text = _json(header)
    text += b" " * (-(len(text) + 8) % ALIGN_BYTES)
    first = len(text) + 8
    placed = [one._replace(at_bytes=first + one.at_bytes) for one in chunks]
    return Laid(len(text).to_bytes(8, "little") + text, order, _json(placed))


def index_text(
    laid: Laid,
    *,
    rank: int,
    own: Mapping[str, JsonValue],
    blocks: Iterable[int],
    fingerprint: str = "",
) -> tuple[bytes, ...]:
    """The text of the index of a file, in pieces; :meth:`PartIndex.from_json` reads it."""
    found = {"rank": rank, "own": own, "blocks": tuple(blocks)}
    if fingerprint:
        found["fingerprint"] = fingerprint
    return _json(found)[:-1], b',"chunks":', laid.chunks, b"}"


def require_tensor(shape: Sequence[int], dtype: str) -> None:
    """Raises ValueError: torch makes no such tensor, whatever memory there is."""
    if dtype not in _DTYPES:
        raise ValueError(f"a tensor of {dtype!r:.80}")
    if math.prod(max(1, size) for size in shape) * _DTYPES[dtype].itemsize >= 1 << 63:
        raise ValueError(f"there is a tensor of shape {list(shape)!r:.80}")


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _require_inside(index: PartIndex, tensors: FileEntry) -> None:
    """Check that each chunk is a part of its tensor, and what bounds the memory that a load takes:
    no two chunks share a byte of the file.

    Raises:
        ValueError: they do, or the file is another one.
    """
    end = 0
    for chunk in index.chunks:
        require_tensor(chunk.shape, chunk.dtype)
        if len({len(chunk.shape), len(chunk.offsets), len(chunk.sizes)}) != 1 or any(
            at + size > whole
            for at, size, whole in zip(chunk.offsets, chunk.sizes, chunk.shape, strict=True)
        ):
            raise ValueError(f"a piece of {chunk.key!r:.80} lies outside of it: {chunk[1:]}")
        if chunk.at_bytes < end or chunk.at_bytes % chunk.torch_dtype.itemsize:
            raise ValueError(f"{chunk.key!r:.80} lies at {chunk.at_bytes}, after {end} bytes")
        end = chunk.at_bytes + chunk.size_bytes
    if end > tensors.size_bytes:
        raise ValueError(f"{end} bytes of tensors are in a file of {tensors.size_bytes}")
    if len(index.blocks) != -(-tensors.size_bytes // BLOCK_BYTES):
        raise ValueError(f"{len(index.blocks)} blocks make {tensors.size_bytes} bytes")
    if checksum_of(index.blocks) != tensors.checksum:
        raise ValueError("the checksums of its blocks are not those of the file of tensors")
