"""nsys profiles made by hand, of the events that a test has made."""

from __future__ import annotations

from pathlib import Path

from report.ranklog import RankLog

from hydroslurm.core.events import Event, EventKind
from hydroslurm.report.nsys.profile import Profile, ProfiledPause, ProfiledStop


def profile_of(log: RankLog, *, late_ns: int = 7_000, kernels: bool = True) -> Profile:
    """A profile that saw everything ``late_ns`` after the log, and kernels around each pause."""
    starts = [event for event in log.events if event.kind is EventKind.GATE_CLOSED]
    stops = [event for event in log.events if event.kind is EventKind.STOP_REQUESTED][:1]
    return Profile(
        path=Path(f"rank-{log.rank}-restart-{log.restart_count}.nsys-rep"),
        host=log.host,
        session_epoch_ns=None,
        pids=(log.pid,),
        pauses=tuple(_pause(log, event, late_ns, kernels) for event in starts),
        stops=tuple(_stop(log, event, late_ns) for event in stops),
        alignment_error_ns=900,
        missing=() if kernels else ("no CUDA kernels were recorded",),
        epoch_offset_ns=None,
        version=None,
    )


def _pause(log: RankLog, closed: Event, late_ns: int, kernels: bool) -> ProfiledPause:
    stamps = {
        event.kind: event for event in log.events if event.data.get("pause") == closed.data["pause"]
    }

    def seen(kind: EventKind) -> int | None:
        return stamps[kind].mono_ns + late_ns if kind in stamps else None

    resumed = stamps.get(EventKind.RESUMED)
    asked_ns = resumed.data["requested_mono_ns"] if resumed else None
    return ProfiledPause(
        pid=log.pid,
        tid=1,
        number=closed.data["pause"],
        signal=20,
        requested_mono_ns=closed.data["requested_mono_ns"],
        parked_mono_ns=seen(EventKind.PARKED),
        drained_mono_ns=None,
        last_kernel_end_mono_ns=closed.mono_ns + 20_000 if kernels else None,
        resume_requested_mono_ns=asked_ns,
        running_mono_ns=seen(EventKind.FIRST_OPERATOR_RELEASED),
        first_kernel_mono_ns=asked_ns + 90_000 if kernels and asked_ns else None,
        error_ns=900,
    )


def _stop(log: RankLog, request: Event, late_ns: int) -> ProfiledStop:
    asked_ns = request.data["requested_mono_ns"]
    return ProfiledStop(
        pid=log.pid,
        signal=15,
        requested_mono_ns=asked_ns,
        saving_mono_ns=asked_ns + 25_000_000 + late_ns,
        durable_mono_ns=asked_ns + 45_000_000 + late_ns,
        committed_mono_ns=asked_ns + 50_000_000 + late_ns,
        requeued_mono_ns=None,
        step=None,
        error_ns=900,
    )
