"""One row per pause and per stop with its whole chain, whatever source each link comes from. Pure.

Pause: request -> received (signal's handler) -> gate closed -> parked -> all ranks parked ->
drained -> stopped by Slurm -> continued = resume requested -> gate opened -> first operator.
Stop: request -> safe point -> staged -> committed -> requeued -> eligible -> started -> first
event -> first step.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from hydroslurm.report.accounting import SlurmLife
from hydroslurm.report.beside import Beside, span_us
from hydroslurm.report.history import History
from hydroslurm.report.nsys.profiled import ProfiledPause, ProfiledStop
from hydroslurm.report.pauses import PEERS, Life, Pause
from hydroslurm.report.stops import Stop, Stopped


@dataclass(frozen=True, slots=True)
class Profiled:
    """A pause as nsys saw it; microseconds, None where its report does not tell.

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
    """One pause of one rank.

    Attributes:
        at_s: since the run's first event; None without any stamp.
        asked_us: from the signal of the rank that was signalled to this rank's being told, by
            aligned dates; None for a rank that had a cause of its own.
        stopped_us: from the request to SIGSTOP as the site's suspend grace has it; None where Slurm
            did not suspend, or the resume came sooner.
        profiled: None without a profile of it.
    """

    life: Life
    pause: Pause
    at_s: float | None
    asked_us: float | None
    stopped_us: float | None
    profiled: Profiled | None


@dataclass(frozen=True, slots=True)
class StopRow:
    """One stop of one rank.

    Attributes:
        at_s: since the run's first event.
        left_s: from the request to the last event.
        before, after: Slurm's life that was stopped, and the one that went on.
        eligible_s: from the end of the one to the moment when the other might start.
        queued_s: from then to its start.
        start_s: from its start to the process's first event: srun, Python, imports.
        samples_lost: with the steps; None where the loader did not tell how many a step has.
        nsys_saving_ms: from the request to the start of the snapshot, by nsys.
        nsys_durable_ms: from the request to parts on disk, by nsys; or to the save's failure.
        nsys_committed_ms: from the request to the commit, by nsys.
        nsys_requeued_ms: from the request until Slurm had the job again, by nsys.
    """

    stopped: Stopped
    at_s: float
    left_s: float | None
    before: SlurmLife | None
    after: SlurmLife | None
    eligible_s: float | None
    queued_s: float | None
    start_s: float | None
    samples_lost: int | None
    nsys_saving_ms: float | None
    nsys_durable_ms: float | None
    nsys_committed_ms: float | None
    nsys_requeued_ms: float | None

    @property
    def stop(self) -> Stop:
        return self.stopped.stop


@dataclass(frozen=True)
class Rows:
    """All of a run; made once for tables, figures and page.

    Attributes:
        pauses: in order of rank, then of time.
        stops: in order of rank, then of time.
    """

    pauses: list[PauseRow]
    stops: list[StopRow]

    @classmethod
    def of(cls, history: History, beside: Beside) -> Rows:
        return cls(pause_rows(history, beside), stop_rows(history, beside))

    @cached_property
    def pauses_in_time(self) -> list[PauseRow]:
        """Those that can be placed, all ranks together."""
        placed = [row for row in self.pauses if row.at_s is not None]
        return sorted(placed, key=lambda row: (row.at_s or 0.0, row.life.rank))

    @cached_property
    def stops_in_time(self) -> list[StopRow]:
        return sorted(self.stops, key=lambda row: (row.at_s, row.stop.rank))


def pause_rows(history: History, beside: Beside) -> list[PauseRow]:
    """In order of rank, then of time."""
    asked = _Asked(history)
    return [
        PauseRow(
            life=life,
            pause=pause,
            at_s=None
            if pause.begin_mono_ns is None
            else history.since_begin_s(life, pause.begin_mono_ns),
            asked_us=asked.before_us(life, pause),
            stopped_us=_stopped_us(pause, beside.accounting.suspend_grace_s),
            profiled=_profiled(pause, beside.profiled_pause(life, pause)),
        )
        for life in history.lives
        for pause in life.pauses
    ]


def stop_rows(history: History, beside: Beside) -> list[StopRow]:
    """In order of rank, then of time."""
    return [_stop_row(history, beside, stopped) for stopped in history.stopped]


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a flat dataclass; ``asdict`` copies each of them, which takes long."""
    return {name.name: getattr(value, name.name) for name in fields(value)}


def _stopped_us(pause: Pause, grace_s: int | None) -> float | None:
    """Nothing in a stopped process can see the moment; slurmstepd counts from its SIGTSTP."""
    if grace_s is None or "slurm" not in pause.causes or pause.signal != "SIGTSTP":
        return None
    held_us = span_us(pause.requested_mono_ns, pause.resume_requested_mono_ns)
    if held_us is not None and held_us < grace_s * 1e6:
        return None
    return grace_s * 1e6


def _profiled(pause: Pause, seen: ProfiledPause | None) -> Profiled | None:
    if seen is None:
        return None
    begin_ns, resume_ns = pause.requested_mono_ns, pause.resume_requested_mono_ns
    park_us = span_us(begin_ns, seen.parked_mono_ns)
    resume_us = span_us(resume_ns, seen.running_mono_ns)
    both = ((park_us, pause.park_us), (resume_us, pause.resume_us))
    apart = [abs(ours - theirs) for ours, theirs in both if ours is not None and theirs is not None]
    return Profiled(
        park_us=park_us,
        drain_us=span_us(seen.parked_mono_ns, seen.drained_mono_ns),
        resume_us=resume_us,
        last_kernel_us=span_us(begin_ns, seen.last_kernel_end_mono_ns),
        first_kernel_us=span_us(resume_ns, seen.first_kernel_mono_ns),
        difference_us=max(apart, default=None),
        error_us=None if seen.error_ns is None else seen.error_ns / 1e3,
    )


class _Asked:
    """Finds, for a rank that was held with another, that other one's request."""

    def __init__(self, history: History) -> None:
        self._requests: dict[tuple[int | None, int], list[tuple[int, int]]] = {}
        for life, pause in _signalled(history):
            assert pause.requested_mono_ns is not None
            begin_ns = life.epoch_ns(pause.requested_mono_ns)
            end_ns = life.epoch_ns(pause.resumed_mono_ns or life.last_mono_ns)
            self._requests.setdefault((life.job_id, life.restart_count), []).append(
                (begin_ns, end_ns)
            )
        for requests in self._requests.values():
            requests.sort()

    def before_us(self, life: Life, pause: Pause) -> float | None:
        if pause.main_cause != PEERS or pause.requested_mono_ns is None:
            return None
        told_ns = life.epoch_ns(pause.requested_mono_ns)
        requests = self._requests.get((life.job_id, life.restart_count), [])
        at = bisect.bisect_right(requests, (told_ns, 1 << 63))
        # several may be in force: the first of them was it
        covering = [begin for begin, end in requests[max(0, at - 8) : at] if told_ns <= end]
        return (told_ns - covering[0]) / 1e3 if covering else None


def _signalled(history: History) -> Iterator[tuple[Life, Pause]]:
    for life in history.lives:
        for pause in life.pauses:
            if pause.main_cause not in (None, PEERS) and pause.requested_mono_ns is not None:
                yield life, pause


def _stop_row(history: History, beside: Beside, stopped: Stopped) -> StopRow:
    life, following, stop = stopped.life, stopped.following, stopped.stop
    before = beside.slurm_life(life)
    after = beside.slurm_life(following) if following else None
    if after is None and before is not None:
        after = beside.accounting.after(before)  # waiting still, or without an event yet
    seen = beside.profiled_stop(life, life.stops[0] if life.stops else None)
    end_s = before.end_epoch_s if before else None
    eligible_s = after.eligible_epoch_s if after else None
    started_s = after.start_epoch_s if after else None
    first_s = _by_slurms_date(following, started_s) if following else None
    gap_s = stop.waited_s
    progress = life.progress
    per_step = progress.samples_per_step if progress else None
    lost = stop.steps_lost
    return StopRow(
        stopped=stopped,
        at_s=history.since_begin_s(life, stopped.begin_mono_ns),
        left_s=_since_us(seen_ns=stop.requested_mono_ns, end_ns=life.last_mono_ns, unit=1e6),
        before=before,
        after=after if after != before else None,
        eligible_s=_later_s(end_s, eligible_s, within_s=gap_s),
        queued_s=_later_s(eligible_s, started_s, within_s=gap_s),
        start_s=_later_s(started_s, first_s),
        samples_lost=None if lost is None or per_step is None else lost * per_step,
        nsys_saving_ms=_nsys_ms(seen, "saving_mono_ns"),
        nsys_durable_ms=_nsys_ms(seen, "durable_mono_ns"),
        nsys_committed_ms=_nsys_ms(seen, "committed_mono_ns"),
        nsys_requeued_ms=_nsys_ms(seen, "requeued_mono_ns"),
    )


def _since_us(*, seen_ns: int | None, end_ns: int | None, unit: float) -> float | None:
    taken_us = span_us(seen_ns, end_ns)
    return None if taken_us is None else taken_us / unit


def _by_slurms_date(life: Life, started_s: float | None) -> float:
    """Its first event. Where the date of its host was set, the controller's may have been the same
    one: what is nearest to the start that Slurm tells is believed."""
    at_ns = life.epoch_ns(life.first_mono_ns)
    found = (at_ns / 1e9, (at_ns + life.date_ahead_ns) / 1e9)
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
    if seen is None:
        return None
    return _since_us(seen_ns=seen.requested_mono_ns, end_ns=getattr(seen, name), unit=1e3)
