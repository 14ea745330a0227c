"""Memory for tensors that are read: its pages, and how large they are."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from hydroslurm.checkpoint import pages
from hydroslurm.checkpoint.pages import advise_huge_pages, is_reported, map_pages, populate

MIB = 1 << 20


def test_populated_memory_has_pages_and_keeps_what_is_in_it() -> None:
    """All of them are there before anything is written, those at the ends too, which others share
    with it; nothing of what was written before is lost."""
    whole = memoryview(map_pages(4 * MIB, inherited=True))
    whole[MIB] = 7
    part = whole[MIB - 100 : 3 * MIB + 100]
    assert _resident_bytes(whole) == mmap.PAGESIZE
    assert populate(part)
    assert _resident_bytes(whole) == 2 * MIB + 2 * mmap.PAGESIZE
    assert whole[MIB] == 7
    assert sum(whole) == 7


def test_what_cannot_be_populated_is_left_to_who_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said that there are no pages: of little memory, by a kernel that does not know how."""
    memory = memoryview(map_pages(MIB, inherited=True))
    assert not populate(memory[:100])
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", 12345)
    assert not populate(memory)
    assert _resident_bytes(memory) == 0


def _resident_bytes(memory: memoryview) -> int:
    """How much of it has pages: the top bit of each of its numbers in the process's page map."""
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(address // mmap.PAGESIZE * 8)
        numbers = memoryview(file.read(len(memory) // mmap.PAGESIZE * 8)).cast("Q")
    return sum(number >> 63 for number in numbers) * mmap.PAGESIZE


@pytest.mark.parametrize(
    ("bits", "reported"), [("01100101", True), ("01100001", False), ("", False), (None, False)]
)
def test_a_guest_that_reports_its_free_memory(
    tmp_path: Path, bits: str | None, reported: bool
) -> None:
    """It is known by the sixth feature of its balloon, as the kernel lists them."""
    if bits is not None:
        (tmp_path / "virtio0").mkdir()
        (tmp_path / "virtio0/features").write_text(bits + "0" * 56 + "\n" if bits else "")
    assert is_reported(tmp_path) is reported


def test_only_memory_that_is_not_reported_is_asked_for_in_huge_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a mapping, and of a tensor that is large enough."""
    for reported in (True, False):
        monkeypatch.setattr(pages, "is_reported", lambda reported=reported: reported)
        mapped = torch.frombuffer(map_pages(8 * MIB, inherited=True), dtype=torch.uint8)
        large = torch.empty(64 * MIB, dtype=torch.uint8)
        advise_huge_pages(large)
        for made in (mapped, large):
            assert _is_advised(made.data_ptr() + made.nbytes // 2) is not reported


def _is_advised(address: int) -> bool:
    """Whether the mapping with this address has been given MADV_HUGEPAGE."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            begin, _, end = first.partition("-")
            inside = int(begin, 16) <= address < int(end, 16)
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is not mapped")
