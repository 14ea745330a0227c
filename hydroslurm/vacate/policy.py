"""When a pause vacates, whether this node can, and whether there is memory and time for it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.errors import UsageError

if TYPE_CHECKING:  # the names below are all that a submission needs
    from hydroslurm.core.memory import Room

VACATE_ENV = "HYDROSLURM_VACATE"
"""Environment variable: ``always``, ``when_asked`` (the default) or ``never``."""
PREEMPT_ENV = "HYDROSLURM_PREEMPT"
"""``vacate`` there means ``pause``, and ``always`` here."""
GRACE_ENV = "HYDROSLURM_SUSPEND_GRACE_S"
"""Environment variable: seconds from Slurm's SIGTSTP to its SIGSTOP, where Slurm is not asked."""
DEFAULT_GRACE_S = 2.0
"""Slurm's own."""
MARGIN_S = 0.25
"""Of the grace, for parking, draining and agreeing."""
_DRIVER = Path("/proc/driver/nvidia/version")


class VacatePolicy(str, Enum):
    """Which pauses vacate."""

    ALWAYS = "always"
    WHEN_ASKED = "when_asked"
    NEVER = "never"

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> VacatePolicy:
        """``HYDROSLURM_VACATE`` wins over ``HYDROSLURM_PREEMPT=vacate``.

        Raises:
            UsageError: another word.
        """
        word = environ.get(VACATE_ENV, "").strip().lower()
        if not word:
            mode = environ.get(PREEMPT_ENV, "").strip().lower()
            return cls.ALWAYS if mode == "vacate" else cls.WHEN_ASKED
        known = [policy.value for policy in cls]
        if word not in known:
            raise UsageError(f"{VACATE_ENV}={word[:60]!r}; wanted one of {', '.join(known)}")
        return cls(word)


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


def grace_from(environ: Mapping[str, str]) -> float | None:
    """``HYDROSLURM_SUSPEND_GRACE_S``; None where it is not set.

    Raises:
        UsageError: no number of seconds.
    """
    text = environ.get(GRACE_ENV, "").strip()
    if not text:
        return None
    if not text.replace(".", "", 1).isdecimal():
        raise UsageError(f"{GRACE_ENV}={text[:60]!r}; wanted a number of seconds, such as 30")
    return float(text)


def why_not_here(*, driver: Path = _DRIVER) -> str:
    """Why this node cannot checkpoint devices, as far as can be told without CUDA; empty if it
    may."""
    try:
        text = driver.read_text(errors="replace")
    except OSError:
        return "this node has no NVIDIA driver"
    number = next((word for word in text.split() if word[:3].isdecimal() and "." in word), "")
    if number and int(number.partition(".")[0]) < 570:
        return f"the NVIDIA driver is {number}; CUDA's checkpoint API needs 570 or newer"
    return ""


def why_no_memory(host_bytes: int, room: Room) -> str:
    """Why the copy would not fit into the host's memory; empty if it does."""
    if host_bytes <= room.free_bytes:
        return ""
    return (
        f"the copy on the host takes {gb(host_bytes)}, and {gb(room.free_bytes)} may be taken: "
        f"{room.message}. Ask for more memory (--mem)"
    )


def why_no_time(device_bytes: int, bytes_per_s: float, *, grace_s: float, passed_s: float) -> str:
    """Why Slurm's SIGSTOP would come before the copy is done; empty if it would not. A copy that is
    frozen half-way frees nothing."""
    needed_s = device_bytes / bytes_per_s
    left_s = grace_s - passed_s - MARGIN_S
    if needed_s <= left_s:
        return ""
    return (
        f"{gb(device_bytes)} at {gb(bytes_per_s)}/s take {needed_s:.1f} s, and "
        f"{max(0.0, left_s):.1f} s are left of the {grace_s:g} s between Slurm's SIGTSTP and its "
        "SIGSTOP. Raise suspend_grace_time in PreemptParameters of slurm.conf"
    )


def fitting_bytes(bytes_per_s: float, *, grace_s: float) -> int:
    """How much device memory fits into the grace."""
    return int(max(0.0, grace_s - MARGIN_S) * bytes_per_s)


def gb(size_bytes: float) -> str:
    """For a sentence."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.1f} MB"
