"""A pause and a stop as an nsys report tells them, in the job's own clock.

Every moment is CLOCK_MONOTONIC of the profiled host, in nanoseconds: the clock of the event log
(:mod:`hydroslurm.core.events`). So a pause here and one of the log are the same one when their
``pid`` and ``requested_mono_ns`` are equal, which they are to the nanosecond: the mark carries the
handler's own stamp. What nsys timed itself is known to ``error_ns``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProfiledPause:
    """One pause of one process. None: the report does not hold it."""

    pid: int
    tid: int | None
    """The thread that was parked last; None when no thread had to be held."""
    number: int | None
    """Of the pause, counted in its process."""
    signal: int
    """0: asked for by the program or by another rank."""
    requested_mono_ns: int | None
    """When the signal handler ran."""
    parked_mono_ns: int | None
    """When the last thread was put to sleep."""
    drained_mono_ns: int | None
    """When the accelerator had finished what was launched before."""
    last_kernel_end_mono_ns: int | None
    """End of the last kernel, copy or memset of before; earlier than the request where the device
    was idle by then."""
    resume_requested_mono_ns: int | None
    """None also where a stop ended the pause."""
    running_mono_ns: int | None
    """When the first thread ran again."""
    first_kernel_mono_ns: int | None
    """Start of the first kernel, copy or memset after that."""
    error_ns: int | None
    """What the moments that nsys timed may be wrong by; None: the clocks could not be joined."""


@dataclass(frozen=True)
class ProfiledStop:
    """One stop of one process. None: the report does not hold it."""

    pid: int
    signal: int
    """0: asked for by the program or by another rank."""
    requested_mono_ns: int | None
    saving_mono_ns: int | None
    """When the snapshot began."""
    durable_mono_ns: int | None
    """When its parts were on disk, or the save had failed."""
    committed_mono_ns: int | None
    requeued_mono_ns: int | None
    """When Slurm had answered."""
    step: int | None
    """That was saved."""
    error_ns: int | None
    """What the moments that nsys timed may be wrong by; None: the clocks could not be joined."""
