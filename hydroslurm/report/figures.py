"""What a run's pauses and stops cost, in numbers: the model of ``report/figures.json``.

docs/figures.md describes every field, and ``hydroslurm report --schema`` prints the JSON Schema;
:mod:`hydroslurm.report.schema` makes both from this model. A latency that nobody measured is absent
from its summary, never 0.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hydroslurm.report.clocks import HostClock
from hydroslurm.report.external_sources import ExternalSources, SlurmAttempt
from hydroslurm.report.goodput import Goodput, goodput_of
from hydroslurm.report.history import History, Summary, summary
from hydroslurm.report.nsys.profile import Profile
from hydroslurm.report.pauses import Outcome, Pause
from hydroslurm.report.rows import PauseRow, Profiled, Rows, StopFigures, StopRow, fields_of
from hydroslurm.report.stops import KILLED, steps_lost_total

MOST_ROWS = 10_000
"""Of ``every_pause`` and ``every_stop``, so that the file can still be opened."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CauseFigures(_Part):
    """The pauses of one cause.

    Attributes:
        pauses: how many.
        park_us: request -> parked, µs.
        resume_us: resume request -> running, µs.
        parked_s: parked time, s.
    """

    pauses: int
    park_us: Summary
    resume_us: Summary
    parked_s: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseFigures(Pause):
    """One pause of one rank with its whole chain.

    Attributes:
        outcome: what became of it; `withdrawn`: resumed before it had parked.
        at_s: from the run's first event to the request; null without any timestamp.
        pid: of the rank.
        asked_us: signal of the rank that was signalled -> this rank was told, µs, by aligned dates;
            null for a rank that had a cause of its own.
        stopped_us: request -> SIGSTOP, µs, according to the site's suspend grace; null where Slurm
            did not suspend, or the resume came sooner.
        nsys: the same pause in an nsys profile.
    """

    outcome: Outcome = field()
    at_s: float | None
    pid: int
    asked_us: float | None
    stopped_us: float | None
    nsys: Profiled | None


class StopsFigures(_Part):
    """The stops of a run.

    Attributes:
        count: stops of all ranks, including killed attempts that were followed by another.
        incomplete: those with events missing from the log.
        killed: those that ended without any event.
        by_reason: what ended them -> number; how they left, where Slurm gave no reason.
        safe_point_ms: request -> end of the step in progress, ms.
        staged_ms: request -> the state is copied, ms.
        written_ms: request -> the files are on the disk, ms.
        durable_ms: request -> committed, ms.
        requeued_ms: request -> in Slurm's queue again, ms.
        eligible_s: end of the job's attempt -> eligible, s, by Slurm.
        queued_s: eligible -> started, s, by Slurm.
        start_s: started by Slurm -> the process's first event, s.
        waited_s: last event -> the next attempt's first event, s.
        first_step_s: that first event -> end of its first step, s.
        steps_lost_total: steps repeated, of the rank that lost the most.
        samples_lost_total: samples of these; null: unknown.
        at_least: true where more may have been lost.
        every_stop: one object per stop, by rank, then time; at most 10,000.
        every_stop_left_out: stops beyond those.
    """

    count: int
    incomplete: int
    killed: int
    by_reason: dict[str, int]
    safe_point_ms: Summary
    staged_ms: Summary
    written_ms: Summary
    durable_ms: Summary
    requeued_ms: Summary
    eligible_s: Summary
    queued_s: Summary
    start_s: Summary
    waited_s: Summary
    first_step_s: Summary
    steps_lost_total: int
    samples_lost_total: int | None
    at_least: bool
    every_stop: tuple[StopFigures, ...]
    every_stop_left_out: int


class ClockFigures(_Part):
    """How times of several processes were aligned.

    Attributes:
        error_ns: of any two moments of the run; null: unknown.
        within_ns: of two moments of one process; null: too few events to tell.
        between_ns: of two hosts' dates; null with one host, or where nothing bounds it.
        hosts: hosts other than the first rank's.
        message: the same, for people.
    """

    error_ns: int | None
    within_ns: int | None
    between_ns: int | None
    hosts: tuple[HostClock, ...]
    message: str


class SlurmFigures(_Part):
    """What Slurm's accounting knows.

    Attributes:
        suspend_grace_s: between SIGTSTP and SIGSTOP on this site.
        attempts: those of the run's jobs; empty where Slurm was not asked.
    """

    suspend_grace_s: int | None
    attempts: tuple[SlurmAttempt, ...]


class ProfileFigures(_Part):
    """One nsys report.

    Attributes:
        path: where it was read.
        host: where it was made.
        pids: processes with marks of hydroslurm.
        pauses: pauses in it.
        stops: stops in it.
        error_us: of its clock against the log's, µs.
    """

    path: str
    host: str | None
    pids: tuple[int, ...]
    pauses: int
    stops: int
    error_us: float | None


class NsysFigures(_Part):
    """What nsys recorded.

    Attributes:
        profiles: the reports that were read.
        joined: pauses that are in the log and in a profile.
        park_us: request -> the last thread was put to sleep, µs.
        resume_us: resume request -> the first thread ran, µs.
        last_kernel_us: request -> end of the last kernel before it, µs.
        first_kernel_us: resume request -> first kernel after it, µs.
        difference_us: largest difference to the log's latencies, µs.
    """

    profiles: tuple[ProfileFigures, ...]
    joined: int
    park_us: Summary
    resume_us: Summary
    last_kernel_us: Summary
    first_kernel_us: Summary
    difference_us: Summary


class Figures(_Part):
    """All figures of one run.

    Attributes:
        schema_version, schema: version of this format.
        run: name of the run folder.
        job_ids: Slurm's; empty outside of a job.
        ranks: ranks that wrote events.
        attempts: processes over all ranks and requeues.
        restarts: how often the job was requeued.
        begin_epoch_s: the run's first event, seconds since 1970.
        observed_s: from the first event to the last.
        events: lines that were read.
        pauses: pauses, including incomplete ones.
        incomplete: those with events missing from the log.
        stop_requests: requests to save and leave; two for one preemption are normal.
        parked_total_s: parked time of all ranks added up.
        in_flight: pauses in which collectives were in flight when all ranks were parked.
        park_us: request -> parked, µs.
        all_parked_us: request -> all ranks parked, µs; several ranks only.
        drain_us: parked -> devices idle, µs; accelerators only.
        resume_us: resume request -> running, µs.
        parked_s: parked time, s.
        asked_us: signal of one rank -> another rank was told, µs.
        save_ms: start of a save -> committed, ms.
        by_cause: cause -> its pauses. A pause counts under its first cause; under `peers` only if
            it has no other, and under `unknown` if that was lost.
        every_pause: one object per pause, by rank, then time; at most 10,000.
        every_pause_left_out: pauses beyond those.
        stops: the attempts that were stopped, and how the run continued.
        goodput: where the time went; null without events.
        clocks: how times of several processes were aligned.
        slurm: what Slurm's accounting knows.
        nsys: what nsys recorded; null without a profile.
        missing: what could not be read or learned, in sentences.
    """

    schema_version: Literal[3] = Field(default=3, serialization_alias="schema")
    run: str
    job_ids: tuple[int, ...]
    ranks: int
    attempts: int
    restarts: int
    begin_epoch_s: float
    observed_s: float
    events: int
    pauses: int
    incomplete: int
    stop_requests: int
    parked_total_s: float
    in_flight: int
    park_us: Summary
    all_parked_us: Summary
    drain_us: Summary
    resume_us: Summary
    parked_s: Summary
    asked_us: Summary
    save_ms: Summary
    by_cause: dict[str, CauseFigures]
    every_pause: tuple[PauseFigures, ...]
    every_pause_left_out: int
    stops: StopsFigures
    goodput: Goodput | None
    clocks: ClockFigures
    slurm: SlurmFigures
    nsys: NsysFigures | None
    missing: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """What is written: an object that json can encode."""
        return self.model_dump(by_alias=True)


def figures_of(
    history: History, sources: ExternalSources | None = None, rows: Rows | None = None
) -> Figures:
    """The figures of a run; ``rows`` if they have been made already."""
    sources = sources or ExternalSources()
    rows = rows or Rows.of(history, sources)
    pauses = history.pauses
    saves = [s for one in history.attempts if one.progress for s in one.progress.saves]
    return Figures(
        run=history.name,
        job_ids=history.job_ids,
        ranks=len(history.ranks),
        attempts=len(history.attempts),
        restarts=history.restarts,
        begin_epoch_s=history.begin_epoch_ns / 1e9,
        observed_s=history.observed_s,
        events=history.events,
        pauses=len(pauses),
        incomplete=sum(not pause.complete for pause in pauses),
        stop_requests=len(history.stop_requests),
        parked_total_s=math.fsum(pause.parked_s or 0.0 for pause in pauses),
        in_flight=sum(bool(pause.in_flight) for pause in pauses),
        **_summaries(Figures, pauses, but=("asked_us", "save_ms")),
        asked_us=summary(row.asked_us for row in rows.pauses),
        save_ms=summary(save.durable_ms for save in saves),
        by_cause=_by_cause(pauses),
        every_pause=tuple(_pause(row) for row in rows.pauses[:MOST_ROWS]),
        every_pause_left_out=max(0, len(rows.pauses) - MOST_ROWS),
        stops=_stops(rows.stops),
        goodput=goodput_of(history, sources),
        clocks=ClockFigures.model_validate(history.alignment, from_attributes=True),
        slurm=SlurmFigures.model_validate(sources.accounting, from_attributes=True),
        nsys=_nsys(rows.pauses, sources),
        missing=tuple(sources.sentences(history)),
    )


def figures_text(figures: Figures) -> str:
    """figures.json: one key per line, and one row of a list of objects, so that less and grep can
    read it, too."""
    return _object(figures.as_dict(), " ") + "\n"


def _object(value: Mapping[str, Any], indent: str) -> str:
    parts = []
    for key, inner in value.items():
        if isinstance(inner, (list, tuple)) and inner and isinstance(inner[0], dict):
            rows = f",\n{indent} ".join(json.dumps(row, allow_nan=False) for row in inner)
            text = f"[\n{indent} {rows}\n{indent}]"
        elif isinstance(inner, dict) and any(isinstance(v, (list, tuple)) for v in inner.values()):
            text = _object(inner, indent + " ")
        else:
            text = json.dumps(inner, allow_nan=False)
        parts.append(f"{indent}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + f"\n{indent[:-1]}}}"


def _summaries(
    model: type[BaseModel], values: Sequence[object], *, but: Collection[str] = ()
) -> dict[str, Any]:
    """A summary for each field of a model that is one, of what these values have by its name."""
    return {
        name: summary(getattr(value, name) for value in values)
        for name, described in model.model_fields.items()
        if described.annotation is Summary and name not in but
    }


def _by_cause(pauses: Iterable[Pause]) -> dict[str, CauseFigures]:
    groups: dict[str, list[Pause]] = {}
    for pause in pauses:
        groups.setdefault(pause.main_cause or "unknown", []).append(pause)
    return {
        cause: CauseFigures(
            pauses=len(group),
            **_summaries(CauseFigures, group),
        )
        for cause, group in sorted(groups.items())
    }


def _pause(row: PauseRow) -> PauseFigures:
    return PauseFigures(
        **fields_of(row.pause),
        outcome=row.pause.outcome,
        at_s=row.at_s,
        pid=row.attempt.pid,
        asked_us=row.asked_us,
        stopped_us=row.stopped_us,
        nsys=row.profiled,
    )


def _stops(rows: list[StopRow]) -> StopsFigures:
    per_rank: dict[int, int] = {}
    for row in rows:
        per_rank[row.rank] = per_rank.get(row.rank, 0) + (row.samples_lost or 0)
    known = any(row.samples_lost is not None for row in rows)
    return StopsFigures(
        count=len(rows),
        incomplete=sum(not stop.complete for stop in rows),
        killed=sum(stop.left == KILLED for stop in rows),
        by_reason=dict(sorted(Counter(stop.reason or stop.left for stop in rows).items())),
        **_summaries(StopsFigures, rows),
        steps_lost_total=steps_lost_total(rows),
        samples_lost_total=max(per_rank.values()) if known else None,
        at_least=any(not stop.steps_lost_exactly for stop in rows),
        every_stop=tuple(rows[:MOST_ROWS]),
        every_stop_left_out=max(0, len(rows) - MOST_ROWS),
    )


def _nsys(rows: list[PauseRow], sources: ExternalSources) -> NsysFigures | None:
    if not sources.profiles:
        return None
    seen = [row.profiled for row in rows if row.profiled is not None]
    return NsysFigures(
        profiles=tuple(_profile(profile) for profile in sources.profiles),
        joined=len(seen),
        **_summaries(NsysFigures, seen),
    )


def _profile(profile: Profile) -> ProfileFigures:
    error_ns = profile.alignment_error_ns
    return ProfileFigures(
        path=str(profile.path),
        host=profile.host,
        pids=profile.pids,
        pauses=len(profile.pauses),
        stops=len(profile.stops),
        error_us=None if error_ns is None else error_ns / 1e3,
    )
