"""One row per pause and per stop with its whole chain, whatever source each link comes from. Pure.

Pause: request -> received (signal's handler) -> gate closed -> parked -> all ranks parked ->
drained -> stopped by Slurm -> continued = resume requested -> gate opened -> first operator.
Stop: request -> safe point -> written -> committed -> requeued -> eligible -> started -> first
event -> first step.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, fields
from typing import Any

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.external_sources import ExternalSources, SlurmAttempt
from hydroslurm.report.history import History
from hydroslurm.report.lines import span
from hydroslurm.report.nsys.profile import ProfiledPause, ProfiledStop
from hydroslurm.report.pauses import PEERS, Pause
from hydroslurm.report.stops import Stop, Stopped


@dataclass(frozen=True, slots=True)
class Profiled:
    """A pause as nsys saw it; microseconds, None where its report lacks them.

    Attributes:
        park_us, drain_us, resume_us: as those of the log.
        last_kernel_us: from the request to the end of the last kernel before the pause.
        first_kernel_us: from the resume request to the start of the first kernel after it.
        difference_us: the largest of the differences to the log's own.
        error_us: by how much moments that nsys timed may be wrong.
    """

    park_us: float | None
    drain_us: float | None
    resume_us: float | None
    last_kernel_us: float | None
    first_kernel_us: float | None
    difference_us: float | None
    error_us: float | None


@dataclass(frozen=True, slots=True)
class PauseRow:
    """One pause of one rank; the fields sources ``attempt`` and ``pause`` are described in
    :class:`hydroslurm.report.figures.PauseFigures`."""

    attempt: Attempt
    pause: Pause
    at_s: float | None
    asked_us: float | None
    stopped_us: float | None
    profiled: Profiled | None


@dataclass(frozen=True, kw_only=True)
class StopFigures(Stop):
    """One stop of one rank with its whole chain.

    Attributes:
        at_s: since the run's first event.
        left_s: from the request to the last event.
        eligible_s: from the end of the attempt to the moment when the next one might start.
        queued_s: from then to its start.
        start_s: from its start to the process's first event: srun, Python, imports.
        samples_lost: with the steps; null where the loader does not record how many a step has.
        nsys_saving_ms: from the request to the start of the snapshot, by nsys.
        nsys_durable_ms: from the request to parts on disk, or to the save's failure, by nsys.
        nsys_committed_ms: from the request to the commit, by nsys.
        nsys_requeued_ms: from the request until Slurm had the job again, by nsys.
        slurm_before: the attempt that was stopped, in Slurm's accounting.
        slurm_after: the one that followed.
    """

    at_s: float
    left_s: float | None
    eligible_s: float | None
    queued_s: float | None
    start_s: float | None
    samples_lost: int | None
    nsys_saving_ms: float | None
    nsys_durable_ms: float | None
    nsys_committed_ms: float | None
    nsys_requeued_ms: float | None
    slurm_before: SlurmAttempt | None
    slurm_after: SlurmAttempt | None


@dataclass(frozen=True, kw_only=True)
class StopRow(StopFigures):
    """The same, with the attempt that was stopped."""

    stopped: Attempt


def pause_rows(history: History, sources: ExternalSources) -> list[PauseRow]:
    """All pauses of a run, in order of rank, then of time."""
    asked = _Asked(history)
    return [
        PauseRow(
            attempt=attempt,
            pause=pause,
            at_s=None
            if pause.begin_mono_ns is None
            else history.since_begin_s(attempt, pause.begin_mono_ns),
            asked_us=asked.before_us(attempt, pause),
            stopped_us=_stopped_us(pause, sources.accounting.suspend_grace_s),
            profiled=_profiled(pause, sources.profiled_pause(attempt, pause)),
        )
        for attempt in history.attempts
        for pause in attempt.pauses
    ]


def stop_rows(history: History, sources: ExternalSources) -> list[StopRow]:
    """All stops of a run, in order of rank, then of time."""
    return [_stop_row(history, sources, stopped) for stopped in history.stopped]


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a flat dataclass; ``asdict`` would copy each value."""
    return {one.name: getattr(value, one.name) for one in fields(value)}


def _stopped_us(pause: Pause, grace_s: int | None) -> float | None:
    """Nothing in a stopped process can see the moment; slurmstepd counts from its SIGTSTP."""
    if grace_s is None or "slurm" not in pause.causes or pause.signal != "SIGTSTP":
        return None
    held_us = span(pause.requested_mono_ns, pause.resume_requested_mono_ns, 1e3)
    if held_us is not None and held_us < grace_s * 1e6:
        return None
    return grace_s * 1e6


def _profiled(pause: Pause, seen: ProfiledPause | None) -> Profiled | None:
    if seen is None:
        return None
    begin_ns, resume_ns = pause.requested_mono_ns, pause.resume_requested_mono_ns
    park_us = span(begin_ns, seen.parked_mono_ns, 1e3)
    resume_us = span(resume_ns, seen.running_mono_ns, 1e3)
    both = ((park_us, pause.park_us), (resume_us, pause.resume_us))
    apart = [abs(ours - theirs) for ours, theirs in both if ours is not None and theirs is not None]
    return Profiled(
        park_us=park_us,
        drain_us=span(seen.parked_mono_ns, seen.drained_mono_ns, 1e3),
        resume_us=resume_us,
        last_kernel_us=span(begin_ns, seen.last_kernel_end_mono_ns, 1e3),
        first_kernel_us=span(resume_ns, seen.first_kernel_mono_ns, 1e3),
        difference_us=max(apart, default=None),
        error_us=None if seen.error_ns is None else seen.error_ns / 1e3,
    )


class _Asked:
    """Finds, for a rank that was held with another, that other one's request."""

    def __init__(self, history: History) -> None:
        self._requests: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
        for attempt in history.attempts:
            requests = self._requests.setdefault((attempt.job_id, attempt.restart_count), [])
            for pause in attempt.pauses:
                begin_ns = pause.requested_mono_ns
                if pause.main_cause not in (None, PEERS) and begin_ns is not None:
                    end_ns = pause.resumed_mono_ns or attempt.last_mono_ns
                    requests.append((attempt.epoch_ns(begin_ns), attempt.epoch_ns(end_ns)))
        for requests in self._requests.values():
            requests.sort()

    def before_us(self, attempt: Attempt, pause: Pause) -> float | None:
        if pause.main_cause != PEERS or pause.requested_mono_ns is None:
            return None
        learned_ns = attempt.epoch_ns(pause.requested_mono_ns)
        requests = self._requests.get((attempt.job_id, attempt.restart_count), [])
        at = bisect.bisect_right(requests, (learned_ns, 1 << 63))
        # several may be in force: the first of them was it
        covering = [begin for begin, end in requests[max(0, at - 8) : at] if learned_ns <= end]
        return (learned_ns - covering[0]) / 1e3 if covering else None


def _stop_row(history: History, sources: ExternalSources, stopped: Stopped) -> StopRow:
    attempt, following, stop = stopped.attempt, stopped.following, stopped.stop
    before = sources.accounting.of(attempt)
    after = sources.accounting.of(following) if following else None
    if after is None and before is not None:
        after = sources.accounting.after(before)  # waiting still, or without an event yet
    seen = sources.profiled_stop(attempt, attempt.stops[0] if attempt.stops else None)
    end_s = before.end_epoch_s if before else None
    eligible_s = after.eligible_epoch_s if after else None
    started_s = after.start_epoch_s if after else None
    first_s = _by_slurms_date(following, started_s) if following else None
    gap_s = stop.waited_s
    per_step = attempt.progress.samples_per_step
    lost = stop.steps_lost
    return StopRow(
        **fields_of(stop),
        stopped=attempt,
        at_s=history.since_begin_s(attempt, stopped.begin_mono_ns),
        left_s=span(stop.requested_mono_ns, attempt.last_mono_ns, 1e9),
        slurm_before=before,
        slurm_after=after if after != before else None,
        eligible_s=_later_s(end_s, eligible_s, within_s=gap_s),
        queued_s=_later_s(eligible_s, started_s, within_s=gap_s),
        start_s=_later_s(started_s, first_s),
        samples_lost=None if lost is None or per_step is None else lost * per_step,
        nsys_saving_ms=_nsys_ms(seen, "saving_mono_ns"),
        nsys_durable_ms=_nsys_ms(seen, "durable_mono_ns"),
        nsys_committed_ms=_nsys_ms(seen, "committed_mono_ns"),
        nsys_requeued_ms=_nsys_ms(seen, "requeued_mono_ns"),
    )


def _by_slurms_date(attempt: Attempt, started_s: float | None) -> float:
    """Its first event. Where the date of its host was set, the controller's may have been the same
    one: the one nearest to Slurm's start time is used."""
    at_ns = attempt.epoch_ns(attempt.first_mono_ns)
    found = (at_ns / 1e9, (at_ns + attempt.date_ahead_ns) / 1e9)
    return found[0] if started_s is None else min(found, key=lambda one: abs(one - started_s))


def _later_s(
    begin_s: float | None, end_s: float | None, *, within_s: float | None = None
) -> float | None:
    """0 where whole seconds make it a little less. None where it runs backwards, or lasts longer
    than the time between two processes that it is a part of: a date was set meanwhile."""
    if begin_s is None or end_s is None or end_s < begin_s - 2:
        return None
    later_s = max(0.0, float(end_s - begin_s))
    return None if within_s is not None and later_s > within_s + 2 else later_s


def _nsys_ms(seen: ProfiledStop | None, name: str) -> float | None:
    return span(seen.requested_mono_ns, getattr(seen, name), 1e6) if seen else None
