"""An nsys report as values: the pauses and stops in it, in the job's own clock.

Every timestamp is CLOCK_MONOTONIC of the profiled host, in nanoseconds: the clock of the event log
(:mod:`hydroslurm.core.events`). A pause here and one in the log are the same when their ``pid`` and
``requested_mono_ns`` are equal; they are equal to the nanosecond, because the NVTX mark carries the
signal handler's own timestamp. What nsys timed itself is accurate to ``error_ns``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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


@dataclass(frozen=True)
class Profile:
    """One nsys report."""

    path: Path
    host: str | None
    session_epoch_ns: int | None
    """Wall clock of the moment that nsys counts from."""
    pids: tuple[int, ...]
    """Processes with marks of hydroslurm."""
    pauses: tuple[ProfiledPause, ...]
    """By process, then in order."""
    stops: tuple[ProfiledStop, ...]
    """By process."""
    alignment_error_ns: int | None
    """The largest ``error_ns`` of the above."""
    missing: tuple[str, ...]
    """What the report does not hold and a reader would look for; plain sentences."""
    epoch_offset_ns: int | None
    """Added to CLOCK_MONOTONIC it gives the wall clock, as it was when nsys began."""
    version: str | None
    """Of the nsys that wrote it."""
