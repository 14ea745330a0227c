"""Memory whose pages are there before it is filled."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from hydroslurm.checkpoint import host_memory
from hydroslurm.checkpoint.host_memory import map_pages, populate

MIB = 1 << 20


def test_populated_memory_has_pages_and_keeps_what_is_in_it() -> None:
    """All of them are there before anything is written, those at the ends too, which others share
    with it; nothing of what was written before is lost."""
    whole = memoryview(map_pages(4 * MIB))
    whole[MIB] = 7
    part = whole[MIB - 100 : 3 * MIB + 100]
    assert _resident_bytes(whole) == mmap.PAGESIZE
    assert populate(part)
    assert _resident_bytes(whole) == 2 * MIB + 2 * mmap.PAGESIZE
    assert whole[MIB] == 7
    assert sum(whole) == 7


def test_what_cannot_be_populated_is_left_to_who_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said that there are no pages: of little memory, by a kernel that does not know how."""
    memory = memoryview(map_pages(MIB))
    assert not populate(memory[:100])
    monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 12345)
    assert not populate(memory)
    assert _resident_bytes(memory) == 0


def _resident_bytes(memory: memoryview) -> int:
    """How much of it has pages: the top bit of each of its numbers in the process's page map."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(address // mmap.PAGESIZE * 8)
        numbers = memoryview(file.read(len(memory) // mmap.PAGESIZE * 8)).cast("Q")
    return sum(number >> 63 for number in numbers) * mmap.PAGESIZE
