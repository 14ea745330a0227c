"""The clocks of this host, and the boot within which the monotonic one counts."""

from __future__ import annotations

import functools
import time
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """The boot of this host, within which CLOCK_MONOTONIC is one clock for all processes; empty
    where there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def clocks() -> tuple[int, int]:
    """Now, as (CLOCK_MONOTONIC ns, CLOCK_REALTIME ns)."""
    return time.monotonic_ns(), time.time_ns()
