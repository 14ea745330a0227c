"""Whole tensors that lie one after the other in a file: one memory for many, filled in one go.

For each of thousands of small tensors it takes longer to say where it goes than to read it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hydroslurm.checkpoint.blocks import Range
from hydroslurm.checkpoint.pages import advise_huge_pages, map_pages
from hydroslurm.checkpoint.tensor_bytes import bytes_of
from hydroslurm.checkpoint.tensor_file import SMALL_BYTES, Chunk

_MOST_BYTES, _MOST_SMALL_BYTES = 32 << 20, 1 << 20
"""Of a memory that tensors share, which is given back when the last of them is; of small ones,
which may be kept alone."""

_ALIGN_BYTES = 64
"""Values lie in memory as they do in the file, of which the first is aligned so."""


class Run(NamedTuple):
    """Tensors and the range of the file that fills them."""

    range: Range
    tensors: dict[str, torch.Tensor]


def runs_of(chunks: Sequence[Chunk]) -> Iterator[Run]:
    """
    Args:
        chunks: of one file, in its order, each of them a whole tensor.
    """
    part: list[tuple[Chunk, int]] = []
    begin = end = most_bytes = 0
    for chunk in chunks:
        size_bytes = chunk.size_bytes
        of_kind = _MOST_SMALL_BYTES if size_bytes < SMALL_BYTES else _MOST_BYTES
        at_bytes = chunk.at_bytes
        if at_bytes != end or of_kind != most_bytes or end + size_bytes - begin > most_bytes:
            if part:
                yield _run(part, begin, end)
                part = []
            begin, most_bytes = at_bytes, of_kind
        part.append((chunk, size_bytes))
        end = at_bytes + size_bytes
    if part:
        yield _run(part, begin, end)


def _run(part: Sequence[tuple[Chunk, int]], begin: int, end: int) -> Run:
    if len(part) == 1:  # in a memory of its own, which may be resized
        ((chunk, _),) = part
        tensor = torch.empty(chunk.shape, dtype=chunk.torch_dtype)
        advise_huge_pages(tensor)
        return Run(Range(begin, bytes_of(tensor)), {chunk.key: tensor})
    first = begin % _ALIGN_BYTES
    size_bytes = first + end - begin
    pages = (
        bytearray(size_bytes)
        if size_bytes < 4 * mmap.PAGESIZE
        else map_pages(size_bytes, inherited=True)
    )
    tensors: dict[str, torch.Tensor] = {}
    shift = first - begin
    make = torch.frombuffer
    for chunk, size_bytes in part:
        shape, dtype = chunk.shape, chunk.torch_dtype
        if not size_bytes:
            tensors[chunk.key] = torch.empty(shape, dtype=dtype)
            continue
        # not a view of one tensor: their storages would be as large as the memory, and what is
        # written to one would count as a change of all
        one = make(
            pages, dtype=dtype, count=size_bytes // dtype.itemsize, offset=chunk.at_bytes + shift
        )
        tensors[chunk.key] = one if len(shape) == 1 else one.view(shape)
    return Run(Range(begin, memoryview(pages)[first:]), tensors)
