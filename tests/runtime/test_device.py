"""Draining, with torch's CUDA calls replaced: the real ones are exercised by
profiling/gpu.sh."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from hydroslurm.runtime import device
from hydroslurm.runtime.device import Drain


def _drain(
    monkeypatch: pytest.MonkeyPatch, synchronize: Callable[[int], None], *, initialized: bool = True
) -> Drain | None:
    """With what device.py uses of torch: two devices; this process has used the second."""
    torch = SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: initialized,
            device_count=lambda: 2,
            synchronize=synchronize,
        ),
        _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index == 1),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    return device.drain(exempt=contextlib.nullcontext)


def test_only_the_devices_that_were_used_are_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device with a context is synchronised once, from another thread, and no other; none
    where the process has not used CUDA."""
    seen: list[tuple[int, bool]] = []

    def synchronize(index: int) -> None:
        seen.append((index, threading.current_thread() is threading.main_thread()))

    assert _drain(monkeypatch, synchronize, initialized=False) is None
    result = _drain(monkeypatch, synchronize)
    assert result is not None
    assert (result.drained, result.devices) == (True, (1,))
    assert seen == [(1, False)]


def test_a_sick_device_does_not_take_the_rank_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the driver becomes the reason."""

    def synchronize(index: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    result = _drain(monkeypatch, synchronize)
    assert result is not None
    assert not result.drained
    assert "illegal memory access" in result.reason
