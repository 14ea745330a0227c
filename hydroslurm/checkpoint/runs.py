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
from hydroslurm.checkpoint.tensor_file import ALIGN_BYTES, SMALL_BYTES, Chunk

_MOST_BYTES, _MOST_SMALL_BYTES = 32 << 20, 1 << 20
"""Of a memory that tensors share, which is given back when the last of them is; of small ones,
which may be kept alone."""


class Run(NamedTuple):
    """Tensors and the range of the file that fills them."""

    range: Range
    tensors: dict[str, torch.Tensor]


def runs_of(chunks: Sequence[Chunk]) -> Iterator[Run]:
    """
    Each tensor begins where torch would have put it, on a multiple of ALIGN_BYTES, unless it is a
    single value: a matrix product adds in another order where its operands lie otherwise, and the
    bits of a resumed training would not be those of an undisturbed one (seen, with a batch of
    18 × 20 values that had been fetched ahead).

    Args:
        chunks: of one file, in its order, each of them a whole tensor.
    """
    part: list[tuple[Chunk, int]] = []
    begin = end = most_bytes = 0
    for chunk in chunks:
        size_bytes = chunk.size_bytes
        of_kind = _MOST_SMALL_BYTES if size_bytes < SMALL_BYTES else _MOST_BYTES
        at_bytes = chunk.at_bytes
        is_off = (at_bytes - begin) % ALIGN_BYTES and size_bytes > chunk.torch_dtype.itemsize
        is_full = end + size_bytes - begin > most_bytes
        if at_bytes != end or of_kind != most_bytes or is_off or is_full:
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
    size_bytes = end - begin
    if size_bytes < 4 * mmap.PAGESIZE:
        pages: bytearray | mmap.mmap = bytearray(size_bytes + ALIGN_BYTES)
        first = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % ALIGN_BYTES
    else:
        pages, first = map_pages(size_bytes, inherited=True), 0
    tensors: dict[str, torch.Tensor] = {}
    shift = first - begin
    make = torch.frombuffer
    for chunk, one_bytes in part:
        shape, dtype = chunk.shape, chunk.torch_dtype
        if not one_bytes:
            tensors[chunk.key] = torch.empty(shape, dtype=dtype)
            continue
        # not a view of one tensor: their storages would be as large as the memory, and what is
        # written to one would count as a change of all
        one = make(
            pages, dtype=dtype, count=one_bytes // dtype.itemsize, offset=chunk.at_bytes + shift
        )
        tensors[chunk.key] = one if len(shape) == 1 else one.view(shape)
    return Run(Range(begin, memoryview(pages)[first : first + size_bytes]), tensors)
