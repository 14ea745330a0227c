"""Memory for tensors that are read: as torch.empty gives it, given back when it is not used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hydroslurm.checkpoint import pages
from hydroslurm.checkpoint.pages import TensorMemory, is_reported

MIB = 1 << 20
SIZES = [(), (0,), (3, 0), (1,), (5, 7), (16 << 10,), (40_001,), (3, MIB), (17, MIB), (2, 100_003)]


@pytest.mark.parametrize("expected_bytes", [0, 100 * MIB])
def test_tensors_have_memory_of_their_own(expected_bytes: int) -> None:
    """Of whatever size and type, none shares a byte with another one, and each can be written."""
    memory = TensorMemory(expected_bytes)
    dtypes = (torch.int64, torch.bfloat16, torch.bool)
    tensors = [memory.empty(shape, dtype) for dtype in dtypes for shape in SIZES]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, tensor in enumerate(tensors):
        assert tensor.dtype == dtypes[number // len(SIZES)]
        assert tensor.shape == SIZES[number % len(SIZES)]
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 64 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        assert bool((tensor == torch.tensor(number).to(tensor.dtype)).all())


def test_more_than_expected() -> None:
    """An estimate that was too low costs nothing but speed."""
    memory = TensorMemory(4 * MIB)
    tensors = [memory.empty((MIB,), torch.uint8) for _ in range(20)]
    assert len({one.data_ptr() for one in tensors}) == 20
    assert all(bool((one.fill_(1) == 1).all()) for one in tensors)


def test_memory_is_given_back() -> None:
    """A group is unmapped when its last tensor is gone; tiny tensors keep none."""
    memory = TensorMemory(8 * MIB)
    tiny = memory.empty((8,), torch.int64)
    large = [memory.empty((MIB,), torch.uint8) for _ in range(4)]
    addresses = [one.data_ptr() for one in large]
    del memory
    del large[:3]
    assert all(map(_mapped, addresses))
    large.clear()
    assert not any(map(_mapped, addresses))
    assert int(tiny.fill_(3).sum()) == 24


def _mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = (line.split()[0].split("-") for line in lines)
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


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
    """Of a group, and of a tensor that is large enough to be one of its own."""
    for reported in (True, False):
        monkeypatch.setattr(pages, "is_reported", lambda reported=reported: reported)
        memory = TensorMemory(100 * MIB)
        for size_bytes in (MIB, 64 * MIB):
            made = memory.empty((size_bytes,), torch.uint8)
            assert _is_advised(made.data_ptr() + size_bytes // 2) is not reported


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
