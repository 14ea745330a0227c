"""What moves device memory away and back: the protocol that every backend follows."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

GB = 1e9


class DeviceState(Enum):
    """Where a process's device memory is; the words are those of CUDA's checkpoint API."""

    RUNNING = "running"
    LOCKED = "locked"
    """In place; calls into the device wait until it is unlocked."""
    CHECKPOINTED = "checkpointed"
    """Away: the device has forgotten this process."""
    FAILED = "failed"
    """Lost: neither on the device nor restorable."""
    UNKNOWN = "unknown"
    """The device's driver does not answer."""


class Backend(Protocol):
    """Moves the device memory of this process.

    The calls block, for their time-out at the longest, and raise
    :class:`~hydroslurm.errors.VacateError` when they fail or take longer. What that has left is
    for :meth:`state` to say. The caller issues no operator meanwhile.
    """

    @property
    def name(self) -> str: ...

    @property
    def bytes_per_s(self) -> float:
        """How fast it moves memory away: as measured in this process, else what it usually does."""
        ...

    def device_bytes(self) -> int:
        """How much memory would be moved."""
        ...

    def host_bytes(self) -> int:
        """How much host memory that takes meanwhile."""
        ...

    def refusal(self) -> str:
        """Why this process cannot be vacated; empty if it can."""
        ...

    def lock(self, timeout_s: float) -> None:
        """RUNNING -> LOCKED."""
        ...

    def checkpoint(self, timeout_s: float) -> int:
        """LOCKED -> CHECKPOINTED; returns the bytes that are free now."""
        ...

    def restore(self, timeout_s: float) -> None:
        """CHECKPOINTED -> LOCKED. Where the device is full, it fails and stays CHECKPOINTED."""
        ...

    def unlock(self, timeout_s: float) -> None:
        """LOCKED -> RUNNING."""
        ...

    def state(self, timeout_s: float) -> DeviceState:
        """Where the memory is; UNKNOWN where nobody answers in time. Raises nothing."""
        ...

    def close(self) -> None:
        """End what it keeps: a process, buffers."""
        ...


def gb(size_bytes: float) -> str:
    """For a sentence."""
    return f"{size_bytes / GB:.1f} GB" if size_bytes >= GB / 10 else f"{size_bytes / 1e6:.1f} MB"
