"""An nsys report as values, and how it is shown: its pauses and stops, in the job's own clock.

Every timestamp is CLOCK_MONOTONIC of the profiled host, in nanoseconds: the clock of the event log
(:mod:`hydroslurm.core.events`). A pause here and one in the log are the same when their ``pid`` and
``requested_mono_ns`` are equal; they are equal to the nanosecond, because the NVTX mark carries the
signal handler's own timestamp. What nsys timed itself is accurate to ``error_ns``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from hydroslurm.core.signals import signal_name
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

    @property
    def unparked_mono_ns(self) -> int | None:
        """When the pause ended: the resume was requested, else the first thread ran."""
        return self.resume_requested_mono_ns or self.running_mono_ns


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


class _Latency(NamedTuple):
    """From one moment of a pause or stop to another, in JSON by its key and as a column."""

    key: str
    begin: str
    end: str
    heading: str
    unit_ns: float
    spec: str
    optional: bool = False

    def between(self, one: object) -> int | None:
        begin_ns, end_ns = (getattr(one, f"{name}_mono_ns") for name in (self.begin, self.end))
        return None if begin_ns is None or end_ns is None else end_ns - begin_ns

    def column(self) -> Column[_Row]:
        def cell(row: _Row) -> str | None:
            return number(row[self.key], self.spec, self.unit_ns)

        return Column(self.heading, cell, optional=self.optional)


_ASKED, _RESUME = "requested", "resume_requested"
_OF_PAUSES = (
    _Latency("park_ns", _ASKED, "parked", "request →\nparked\n(µs)", _US, ",.0f"),
    _Latency("drain_ns", _ASKED, "drained", "→ device\nidle\n(µs)", _US, ",.0f", True),
    _Latency(
        "last_kernel_ns", _ASKED, "last_kernel_end", "→ last\nkernel end\n(µs)", _US, ",.0f", True
    ),
    _Latency("parked_ns", "parked", "unparked", "parked\n\n(s)", _S, ".3f"),
    _Latency("resume_ns", _RESUME, "running", "resume →\nrunning\n(µs)", _US, ",.0f"),
    _Latency(
        "first_kernel_ns", _RESUME, "first_kernel", "→ first\nkernel\n(µs)", _US, ",.0f", True
    ),
)
_OF_STOPS = (
    _Latency("saving_ns", _ASKED, "saving", "request →\nsaving\n(ms)", _MS, ",.1f"),
    _Latency("durable_ns", _ASKED, "durable", "→ durable\n\n(ms)", _MS, ",.1f"),
    _Latency("committed_ns", _ASKED, "committed", "→ commit-\nted\n(ms)", _MS, ",.1f"),
    _Latency("requeued_ns", _ASKED, "requeued", "→ requeue\nanswered\n(ms)", _MS, ",.1f"),
)


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
        "pauses": [_with_latencies(pause, _OF_PAUSES) for pause in profile.pauses],
        "stops": [_with_latencies(stop, _OF_STOPS) for stop in profile.stops],
        "missing": list(profile.missing),
    }


def profile_view(profile: Profile, *, max_rows: int = 40) -> RenderableType:
    """A table of pauses and one of stops; the error of the clocks; what is missing."""
    parts: list[RenderableType] = [Text(_heading(profile), style="bold")]
    figures = profile_figures(profile)
    if profile.pauses:
        parts.append(
            in_terminal(_table("pause", "number", _OF_PAUSES, figures["pauses"], max_rows))
        )
    if profile.stops:
        parts.append(in_terminal(_table("step", "step", _OF_STOPS, figures["stops"], max_rows)))
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


def _with_latencies(one: object, latencies: Iterable[_Latency]) -> _Row:
    return {**vars(one), **{latency.key: latency.between(one) for latency in latencies}}


def _table(
    counted: str, key: str, latencies: Iterable[_Latency], rows: Sequence[_Row], most: int
) -> Table:
    columns: list[Column[_Row]] = [
        Column("process", lambda row: str(row["pid"])),
        Column(counted, lambda row: number(row[key], "d")),
        # 0 was asked for by the program or by another rank
        Column(
            "signal", lambda row: signal_name(row["signal"]) if row["signal"] else "none", left=True
        ),
        *(latency.column() for latency in latencies),
        Column("error\n\n(±µs)", lambda row: number(row["error_ns"], ",.1f", _US)),
    ]
    return table_of("", columns, rows, most=most)
