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


def _torch(synchronize: Callable[[int], None], *, initialized: bool = True) -> SimpleNamespace:
    """What device.py uses of torch: two devices, of which this process has used the second."""
    return SimpleNamespace(
        cuda=SimpleNamespace(
            is_available=lambda: True,
            is_initialized=lambda: initialized,
            device_count=lambda: 2,
            synchronize=synchronize,
        ),
        _C=SimpleNamespace(_cuda_hasPrimaryContext=lambda index: index == 1),
    )


def _drain() -> Drain:
    drain = device.drain(limit_s=30, exempt=contextlib.nullcontext)
    assert drain is not None
    return drain


def test_only_the_devices_that_were_used_are_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device with a context is synchronised once, from another thread, and no other."""
    seen: list[tuple[int, int]] = []

    def synchronize(index: int) -> None:
        seen.append((index, threading.get_ident()))

    monkeypatch.setitem(sys.modules, "torch", _torch(synchronize))
    result = _drain()
    assert result.drained
    assert result.devices == (1,)
    assert [index for index, _ in seen] == [1]
    assert seen[0][1] != threading.get_ident()


def test_a_sick_device_does_not_take_the_rank_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the driver becomes the reason."""

    def synchronize(index: int) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setitem(sys.modules, "torch", _torch(synchronize))
    result = _drain()
    assert not result.drained
    assert "illegal memory access" in result.reason


def test_cuda_is_never_initialised_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not used CUDA has nothing to drain, and synchronize is not called."""

    def synchronize(index: int) -> None:
        raise AssertionError("synchronised")

    monkeypatch.setitem(sys.modules, "torch", _torch(synchronize, initialized=False))
    assert device.used_devices() == ()
    assert device.drain(limit_s=1, exempt=contextlib.nullcontext) is None
