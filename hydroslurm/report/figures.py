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
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hydroslurm.report.clocks import HostClock
from hydroslurm.report.external_sources import ExternalSources, SlurmAttempt
from hydroslurm.report.goodput import Goodput, goodput_of
from hydroslurm.report.history import History, Summary, summary
from hydroslurm.report.nsys.profile import Profile
from hydroslurm.report.pauses import Outcome, Pause
from hydroslurm.report.rows import (
    PauseRow,
    Profiled,
    StopFigures,
    StopRow,
    fields_of,
    pause_rows,
    stop_rows,
)
from hydroslurm.report.stops import KILLED, steps_lost_total

MOST_ROWS = 10_000
"""Of ``every_pause`` and ``every_stop``, so that the file can still be opened."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CauseFigures(_Part):
    """The pauses of one cause."""

    pauses: Annotated[int, "how many."]
    park_us: Annotated[Summary, "request -> parked, µs."]
    resume_us: Annotated[Summary, "resume request -> running, µs."]
    parked_s: Annotated[Summary, "parked time, s."]


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
    """The stops of a run."""

    count: Annotated[
        int, "stops of all ranks, including killed attempts that were followed by another."
    ]
    incomplete: Annotated[int, "those with events missing from the log."]
    killed: Annotated[int, "those that ended without any event."]
    by_reason: Annotated[
        dict[str, int], "what ended them -> number; how they left, where Slurm gave no reason."
    ]
    safe_point_ms: Annotated[Summary, "request -> end of the step in progress, ms."]
    staged_ms: Annotated[Summary, "request -> the state is copied, ms."]
    written_ms: Annotated[Summary, "request -> the files are on the disk, ms."]
    durable_ms: Annotated[Summary, "request -> committed, ms."]
    requeued_ms: Annotated[Summary, "request -> in Slurm's queue again, ms."]
    eligible_s: Annotated[Summary, "end of the job's attempt -> eligible, s, by Slurm."]
    queued_s: Annotated[Summary, "eligible -> started, s, by Slurm."]
    start_s: Annotated[Summary, "started by Slurm -> the process's first event, s."]
    waited_s: Annotated[Summary, "last event -> the next attempt's first event, s."]
    first_step_s: Annotated[Summary, "that first event -> end of its first step, s."]
    steps_lost_total: Annotated[int, "steps repeated, of the rank that lost the most."]
    samples_lost_total: Annotated[int | None, "samples of these; null: unknown."]
    at_least: Annotated[bool, "true where more may have been lost."]
    every_stop: Annotated[
        tuple[StopFigures, ...], "one object per stop, by rank, then time; at most 10,000."
    ]
    every_stop_left_out: Annotated[int, "stops beyond those."]


class ClockFigures(_Part):
    """How times of several processes were aligned."""

    error_ns: Annotated[int | None, "of any two moments of the run; null: unknown."]
    within_ns: Annotated[int | None, "of two moments of one process; null: too few events to tell."]
    between_ns: Annotated[
        int | None, "of two hosts' dates; null with one host, or where nothing bounds it."
    ]
    hosts: Annotated[tuple[HostClock, ...], "hosts other than the first rank's."]
    message: Annotated[str, "the same, for people."]


class SlurmFigures(_Part):
    """What Slurm's accounting knows."""

    suspend_grace_s: Annotated[int | None, "between SIGTSTP and SIGSTOP on this site."]
    attempts: Annotated[
        tuple[SlurmAttempt, ...], "those of the run's jobs; empty where Slurm was not asked."
    ]


class ProfileFigures(_Part):
    """One nsys report."""

    path: Annotated[str, "where it was read."]
    host: Annotated[str | None, "where it was made."]
    pids: Annotated[tuple[int, ...], "processes with marks of hydroslurm."]
    pauses: Annotated[int, "pauses in it."]
    stops: Annotated[int, "stops in it."]
    error_us: Annotated[float | None, "of its clock against the log's, µs."]


class NsysFigures(_Part):
    """What nsys recorded."""

    profiles: Annotated[tuple[ProfileFigures, ...], "the reports that were read."]
    joined: Annotated[int, "pauses that are in the log and in a profile."]
    park_us: Annotated[Summary, "request -> the last thread was put to sleep, µs."]
    resume_us: Annotated[Summary, "resume request -> the first thread ran, µs."]
    last_kernel_us: Annotated[Summary, "request -> end of the last kernel before it, µs."]
    first_kernel_us: Annotated[Summary, "resume request -> first kernel after it, µs."]
    difference_us: Annotated[Summary, "largest difference to the log's latencies, µs."]


class Figures(_Part):
    """All figures of one run."""

    schema_version: Annotated[Literal[3], "version of this format."] = Field(
        default=3, serialization_alias="schema"
    )
    run: Annotated[str, "name of the run folder."]
    job_ids: Annotated[tuple[int, ...], "Slurm's; empty outside of a job."]
    ranks: Annotated[int, "ranks that wrote events."]
    attempts: Annotated[int, "processes over all ranks and requeues."]
    restarts: Annotated[int, "how often the job was requeued."]
    begin_epoch_s: Annotated[float, "the run's first event, seconds since 1970."]
    observed_s: Annotated[float, "from the first event to the last."]
    events: Annotated[int, "lines that were read."]
    pauses: Annotated[int, "pauses, including incomplete ones."]
    incomplete: Annotated[int, "those with events missing from the log."]
    stop_requests: Annotated[int, "requests to save and leave; two for one preemption are normal."]
    parked_total_s: Annotated[float, "parked time of all ranks added up."]
    in_flight: Annotated[
        int, "pauses in which collectives were in flight when all ranks were parked."
    ]
    park_us: Annotated[Summary, "request -> parked, µs."]
    all_parked_us: Annotated[Summary, "request -> all ranks parked, µs; several ranks only."]
    drain_us: Annotated[Summary, "parked -> devices idle, µs; accelerators only."]
    resume_us: Annotated[Summary, "resume request -> running, µs."]
    parked_s: Annotated[Summary, "parked time, s."]
    asked_us: Annotated[Summary, "signal of one rank -> another rank was told, µs."]
    save_ms: Annotated[Summary, "start of a save -> committed, ms."]
    by_cause: Annotated[
        dict[str, CauseFigures],
        "cause -> its pauses. A pause counts under its first cause; under `peers` only if it has "
        "no other, and under `unknown` if that was lost.",
    ]
    every_pause: Annotated[
        tuple[PauseFigures, ...], "one object per pause, by rank, then time; at most 10,000."
    ]
    every_pause_left_out: Annotated[int, "pauses beyond those."]
    stops: Annotated[StopsFigures, "the attempts that were stopped, and how the run continued."]
    goodput: Annotated[Goodput | None, "where the time went; null without events."]
    clocks: Annotated[ClockFigures, "how times of several processes were aligned."]
    slurm: Annotated[SlurmFigures, "what Slurm's accounting knows."]
    nsys: Annotated[NsysFigures | None, "what nsys recorded; null without a profile."]
    missing: Annotated[tuple[str, ...], "what could not be read or learned, in sentences."]

    def as_dict(self) -> dict[str, Any]:
        """What is written: an object that json can encode."""
        return self.model_dump(by_alias=True)


@dataclass(frozen=True)
class Report:
    """A run, and what other sources say of it: what tables, page and figures are made from."""

    history: History
    sources: ExternalSources = field(default_factory=ExternalSources)

    @cached_property
    def pauses(self) -> list[PauseRow]:
        """In order of rank, then of time."""
        return pause_rows(self.history, self.sources)

    @cached_property
    def stops(self) -> list[StopRow]:
        """In order of rank, then of time."""
        return stop_rows(self.history, self.sources)

    @cached_property
    def pauses_in_time(self) -> list[PauseRow]:
        """Those that can be placed, all ranks together."""
        placed = [row for row in self.pauses if row.at_s is not None]
        return sorted(placed, key=lambda row: (row.at_s or 0.0, row.attempt.rank))

    @cached_property
    def stops_in_time(self) -> list[StopRow]:
        return sorted(self.stops, key=lambda row: (row.at_s, row.rank))

    @cached_property
    def figures(self) -> Figures:
        return _figures(self)


def _figures(report: Report) -> Figures:
    history, sources, pauses = report.history, report.sources, report.history.pauses
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
        asked_us=summary(row.asked_us for row in report.pauses),
        save_ms=summary(save.save_ms for save in history.saves),
        by_cause=_by_cause(pauses),
        every_pause=tuple(_pause(row) for row in report.pauses[:MOST_ROWS]),
        every_pause_left_out=max(0, len(report.pauses) - MOST_ROWS),
        stops=_stops(report.stops),
        goodput=goodput_of(history, sources),
        clocks=ClockFigures.model_validate(history.alignment, from_attributes=True),
        slurm=SlurmFigures.model_validate(sources.accounting, from_attributes=True),
        nsys=_nsys(report.pauses, sources),
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
