"""What happened when, by the date of now: a date that was set meanwhile makes nothing older."""

from __future__ import annotations

import functools
import socket
import time
from pathlib import Path

_SET_NS = 10**9
"""Dates that differ by so much were set."""


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


def agrees_with_now(mono_ns: int, epoch_ns: int, *, now: tuple[int, int]) -> bool:
    """Whether nobody has set the date of this host between an event of this boot and now (its
    monotonic clock and its date)."""
    return abs((now[1] - epoch_ns) - (now[0] - mono_ns)) < _SET_NS


def by_date_of_now(
    mono_ns: int, epoch_ns: int, host: str, *, now: tuple[int, int] | None = None
) -> int:
    """The moment of an event as the date that this host has now would have told it, epoch ns.

    Of an event of another host, or of an earlier boot of this one, it is what was told then: what
    is older than this boot is older than its CLOCK_MONOTONIC says now.

    Args:
        mono_ns, epoch_ns: CLOCK_MONOTONIC and CLOCK_REALTIME when it happened.
        host: where.
        now: both clocks of here, for tests.
    """
    if host != socket.gethostname():
        return epoch_ns
    now_mono_ns, now_epoch_ns = now or clocks()
    age_ns, told_age_ns = now_mono_ns - mono_ns, now_epoch_ns - epoch_ns
    is_of_this_boot = age_ns >= 0 and told_age_ns < now_mono_ns
    if not is_of_this_boot or agrees_with_now(mono_ns, epoch_ns, now=(now_mono_ns, now_epoch_ns)):
        return epoch_ns
    return now_epoch_ns - age_ns
