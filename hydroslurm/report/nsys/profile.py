"""An nsys report as values, and how it is shown: its pauses and stops, in the job's own clock.

Every timestamp is CLOCK_MONOTONIC of the profiled host, in nanoseconds: the clock of the event log
(:mod:`hydroslurm.core.events`). A pause here and one in the log are the same when their ``pid`` and
``requested_mono_ns`` are equal; they are equal to the nanosecond, because the NVTX mark carries the
signal handler's own timestamp. What nsys timed itself is accurate to ``error_ns``.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hydroslurm.report.tables import Column, Table, in_terminal, number, table_of


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


# --- one report alone, for a terminal and as JSON ------------------------------------------------

_US, _MS, _S = 1e3, 1e6, 1e9
_Row = dict[str, Any]


def profile_figures(profile: Profile) -> dict[str, Any]:
    """All of it for JSON: moments as they are, latencies as ``*_ns``; null where not known."""
    return {
        "report": str(profile.path),
        "nsys_version": profile.version,
        "host": profile.host,
        "session_epoch_ns": profile.session_epoch_ns,
        "epoch_offset_ns": profile.epoch_offset_ns,
        "alignment_error_ns": profile.alignment_error_ns,
        "pids": list(profile.pids),
        "pauses": [{**vars(pause), **_pause_latencies(pause)} for pause in profile.pauses],
        "stops": [{**vars(stop), **_stop_latencies(stop)} for stop in profile.stops],
        "missing": list(profile.missing),
    }


def profile_view(profile: Profile, *, max_rows: int = 40) -> RenderableType:
    """A table of pauses and one of stops; the error of the clocks; what is missing."""
    parts: list[RenderableType] = [Text(_heading(profile), style="bold")]
    figures = profile_figures(profile)
    if profile.pauses:
        parts.append(in_terminal(_pauses_table(figures["pauses"], max_rows)))
    if profile.stops:
        parts.append(in_terminal(_stops_table(figures["stops"], max_rows)))
    if profile.pids and not profile.pauses and not profile.stops:
        parts.append(Text("Nothing was paused or stopped while nsys recorded."))
    if profile.alignment_error_ns is not None:
        parts.append(
            Text(
                "nsys's clock is joined to CLOCK_MONOTONIC, the clock of the event log, to within "
                f"{profile.alignment_error_ns / _US:,.1f} µs; requests carry the stamp of the "
                "signal's handler and have no such error.",
                style="dim",
            )
        )
    parts += [Text(f"Missing: {sentence}.") for sentence in profile.missing]
    return Group(*parts)


def _heading(profile: Profile) -> str:
    parts = [profile.path.name]
    if profile.host:
        parts.append(f"host {profile.host}")
    if profile.pids:
        plural = "es" if len(profile.pids) > 1 else ""
        parts.append(f"process{plural} {', '.join(map(str, profile.pids))}")
    if profile.version:
        parts.append(f"nsys {profile.version}")
    return " · ".join(parts)


def _pause_latencies(pause: ProfiledPause) -> dict[str, int | None]:
    asked, resumed = pause.requested_mono_ns, pause.resume_requested_mono_ns
    return {
        "park_ns": _between(asked, pause.parked_mono_ns),
        "drain_ns": _between(asked, pause.drained_mono_ns),
        "last_kernel_ns": _between(asked, pause.last_kernel_end_mono_ns),
        "parked_ns": _between(pause.parked_mono_ns, resumed or pause.running_mono_ns),
        "resume_ns": _between(resumed, pause.running_mono_ns),
        "first_kernel_ns": _between(resumed, pause.first_kernel_mono_ns),
    }


def _stop_latencies(stop: ProfiledStop) -> dict[str, int | None]:
    asked = stop.requested_mono_ns
    return {
        "saving_ns": _between(asked, stop.saving_mono_ns),
        "durable_ns": _between(asked, stop.durable_mono_ns),
        "committed_ns": _between(asked, stop.committed_mono_ns),
        "requeued_ns": _between(asked, stop.requeued_mono_ns),
    }


def _between(start_ns: int | None, end_ns: int | None) -> int | None:
    return None if start_ns is None or end_ns is None else end_ns - start_ns


def _pauses_table(rows: Sequence[_Row], most: int) -> Table:
    columns = [
        *_who("pause", "number"),
        _latency("request →\nparked\n(µs)", "park_ns", _US, ",.0f"),
        _latency("→ device\nidle\n(µs)", "drain_ns", _US, ",.0f", optional=True),
        _latency("→ last\nkernel end\n(µs)", "last_kernel_ns", _US, ",.0f", optional=True),
        _latency("parked\n\n(s)", "parked_ns", _S, ".3f"),
        _latency("resume →\nrunning\n(µs)", "resume_ns", _US, ",.0f"),
        _latency("→ first\nkernel\n(µs)", "first_kernel_ns", _US, ",.0f", optional=True),
        _latency("error\n\n(±µs)", "error_ns", _US, ",.1f"),
    ]
    return table_of("", columns, rows, most=most)


def _stops_table(rows: Sequence[_Row], most: int) -> Table:
    columns = [
        *_who("step", "step"),
        _latency("request →\nsaving\n(ms)", "saving_ns", _MS, ",.1f"),
        _latency("→ durable\n\n(ms)", "durable_ns", _MS, ",.1f"),
        _latency("→ commit-\nted\n(ms)", "committed_ns", _MS, ",.1f"),
        _latency("→ requeue\nanswered\n(ms)", "requeued_ns", _MS, ",.1f"),
        _latency("error\n\n(±µs)", "error_ns", _US, ",.1f"),
    ]
    return table_of("", columns, rows, most=most)


def _who(counted: str, key: str) -> list[Column[_Row]]:
    return [
        Column("process", lambda row: str(row["pid"])),
        Column(counted, lambda row: number(row[key], "d")),
        Column("signal", lambda row: _signal(row["signal"]), left=True),
    ]


def _latency(
    heading: str, key: str, unit_ns: float, spec: str, *, optional: bool = False
) -> Column[_Row]:
    return Column(heading, lambda row: number(row[key], spec, unit_ns), optional=optional)


def _signal(number: int) -> str:
    """By its name; 0 was asked for by the program or by another rank."""
    if number == 0:
        return "none"
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
