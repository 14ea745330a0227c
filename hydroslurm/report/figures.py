"""The cost of a run's pauses and stops in figures: the model of ``report/figures.json``.

The JSON Schema (``hydroslurm report --schema``) and the reference in docs/figures.md derive from
it. A latency that was never measured is absent from its summary, never 0.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from hydroslurm.core.figure import figure, required
from hydroslurm.core.files import clean
from hydroslurm.core.goodput import Goodput
from hydroslurm.report.clocks import Alignment
from hydroslurm.report.external_sources import (
    Accounting,
    PauseRow,
    pause_rows,
    stopped_rows,
)
from hydroslurm.report.goodput import goodput_of
from hydroslurm.report.history import History, Summary, summary
from hydroslurm.report.nsys import Profile
from hydroslurm.report.pauses import Pause
from hydroslurm.report.stops import KILLED, Stop, Stopped, steps_lost_total

MOST_ROWS = 10_000
"""Limit on ``every_pause`` and ``every_stop``, so that the file stays readable."""


@dataclass(frozen=True, kw_only=True)
class CauseFigures:
    """The pauses of one cause."""

    # fmt: off
    pauses: int = required("How many.")
    park_us: Summary = required("Request -> parked, µs.")
    resume_us: Summary = required("Resume request -> running, µs.")
    parked_s: Summary = required("Parked time, s.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class StopsFigures:
    """The stops of a run."""

    # fmt: off
    count: int = required(
        "Stops of all ranks, including killed attempts that were followed by another.")
    incomplete: int = required("Those with events missing from the log.")
    killed: int = required("Those that ended without any event.")
    by_reason: dict[str, int] = required(
        "What ended them -> number; how they left, where Slurm gave no reason.")
    safe_point_ms: Summary = required("Request -> end of the step in progress, ms.")
    staged_ms: Summary = required("Request -> the state is copied, ms.")
    written_ms: Summary = required("Request -> the files are on the disk, ms.")
    durable_ms: Summary = required("Request -> committed, ms.")
    requeued_ms: Summary = required("Request -> in Slurm's queue again, ms.")
    eligible_s: Summary = required("End of the job's attempt -> eligible, s, by Slurm.")
    queued_s: Summary = required("Eligible -> started, s, by Slurm.")
    start_s: Summary = required("Started by Slurm -> the process's first event, s.")
    waited_s: Summary = required("Last event -> the next attempt's first event, s.")
    first_step_s: Summary = required("That first event -> end of its first step, s.")
    steps_lost_total: int = required("Steps repeated, of the rank that lost the most.")
    samples_lost_total: int | None = required("Samples of these; null: unknown.")
    at_least: bool = required("True where more may have been lost.")
    every_stop: tuple[Stop, ...] = required(
        "One object per stop, by rank, then time; at most 10,000.")
    every_stop_left_out: int = required("Stops beyond those.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class ProfileFigures:
    """One nsys report."""

    # fmt: off
    path: str = required("Where it was read.")
    host: str | None = required("Where it was made.")
    pids: tuple[int, ...] = required("Processes with marks of hydroslurm.")
    pauses: int = required("Pauses in it.")
    stops: int = required("Stops in it.")
    error_us: float | None = required("Of its clock against the log's, µs.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class NsysFigures:
    """What nsys recorded."""

    # fmt: off
    profiles: tuple[ProfileFigures, ...] = required("The reports that were read.")
    joined: int = required("Pauses that are in the log and in a profile.")
    park_us: Summary = required("Request -> the last thread was put to sleep, µs.")
    resume_us: Summary = required("Resume request -> the first thread ran, µs.")
    last_kernel_us: Summary = required("Request -> end of the last kernel before it, µs.")
    first_kernel_us: Summary = required("Resume request -> first kernel after it, µs.")
    difference_us: Summary = required("Largest difference to the log's latencies, µs.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class Figures:
    """All figures of one run."""

    # fmt: off
    schema: Literal[3] = figure("Version of this format.", default=3)
    run: str = required("Name of the run folder.")
    job_ids: tuple[int, ...] = required("Slurm's; empty outside of a job.")
    ranks: int = required("Ranks that wrote events.")
    attempts: int = required("Processes over all ranks and requeues.")
    restarts: int = required("How often the job was requeued.")
    begin_epoch_s: float = required("The run's first event, seconds since 1970.")
    observed_s: float = required("From the first event to the last.")
    events: int = required("Lines that were read.")
    pauses: int = required("Pauses, including incomplete ones.")
    incomplete: int = required("Those with events missing from the log.")
    stop_requests: int = required("Requests to save and leave; two for one preemption are normal.")
    parked_total_s: float = required("Parked time of all ranks added up.")
    in_flight: int = required(
        "Pauses in which collectives were in flight when all ranks were parked.")
    park_us: Summary = required("Request -> parked, µs.")
    all_parked_us: Summary = required("Request -> all ranks parked, µs; several ranks only.")
    drain_us: Summary = required("Parked -> devices idle, µs; accelerators only.")
    resume_us: Summary = required("Resume request -> running, µs.")
    parked_s: Summary = required("Parked time, s.")
    asked_us: Summary = required("Signal of one rank -> another rank was told, µs.")
    save_ms: Summary = required("Start of a save -> committed, ms.")
    by_cause: dict[str, CauseFigures] = required(
        "Cause -> its pauses. A pause counts under its first cause; under `peers` only if it has "
        "no other, and under `unknown` if that was lost.")
    every_pause: tuple[Pause, ...] = required(
        "One object per pause, by rank, then time; at most 10,000.")
    every_pause_left_out: int = required("Pauses beyond those.")
    stops: StopsFigures = required("The attempts that were stopped, and how the run continued.")
    goodput: Goodput | None = required("Where the time went; null without events.")
    clocks: Alignment = required("How times of several processes were aligned.")
    slurm: Accounting = required("What Slurm's accounting knows.")
    nsys: NsysFigures | None = required("What nsys recorded; null without a profile.")
    missing: tuple[str, ...] = required("What could not be read or learned, in sentences.")
    # fmt: on

    def as_dict(self) -> dict[str, Any]:
        """Return an object that json can encode."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        return document


@dataclass(frozen=True)
class Report:
    """A run with its other sources; tables, page and figures derive from it.

    Attributes:
        accounting: Slurm's answers.
        profiles: nsys reports.
        unread: sources that could not be read, in sentences.
    """

    history: History
    accounting: Accounting = field(default_factory=Accounting)
    profiles: tuple[Profile, ...] = ()
    unread: tuple[str, ...] = ()

    @cached_property
    def missing(self) -> list[str]:
        """What is missing, and which profiles do not belong to this run, in sentences."""
        history = self.history
        pids = {attempt.pid for attempt in history.attempts}
        sentences = [*history.missing, *self.accounting.missing, *self.unread]
        for profile in self.profiles:
            sentences += [f"{profile.path.name}: {sentence}" for sentence in profile.missing]
            if history.attempts and not pids & set(profile.pids):
                sentences.append(f"{profile.path.name}: it holds no process of this run.")
        return [_sentence(text) for text in sentences]

    @cached_property
    def pauses(self) -> list[PauseRow]:
        """All pauses, by rank, then time."""
        return pause_rows(self.history, self.accounting, self.profiles)

    @cached_property
    def pauses_in_time(self) -> list[PauseRow]:
        """Pauses of all ranks that have a place in time, in order."""
        placed = [row for row in self.pauses if row.at_s is not None]
        return sorted(placed, key=lambda row: (row.at_s or 0.0, row.pause.rank))

    @cached_property
    def stopped(self) -> list[Stopped]:
        """The stops with their attempts, by rank, then time."""
        return stopped_rows(self.history, self.accounting, self.profiles)

    @cached_property
    def stopped_in_time(self) -> list[Stopped]:
        return sorted(self.stopped, key=lambda s: (s.stop.at_s, s.stop.rank))

    @cached_property
    def figures(self) -> Figures:
        return _figures(self)


def _sentence(text: str) -> str:
    text = clean(text, most=2000)
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _figures(report: Report) -> Figures:
    history, pauses = report.history, report.history.pauses
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
        every_pause=tuple(row.joined for row in report.pauses[:MOST_ROWS]),
        every_pause_left_out=max(0, len(report.pauses) - MOST_ROWS),
        stops=_stops([s.stop for s in report.stopped]),
        goodput=goodput_of(history, report.accounting),
        clocks=history.alignment,
        slurm=report.accounting,
        nsys=_nsys(report),
        missing=tuple(report.missing),
    )


def figures_text(figures: Figures) -> str:
    """Format figures.json: one key, or one row of a list of objects, per line, for less and
    grep."""
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
    model: Any, values: Sequence[object], *, but: Collection[str] = ()
) -> dict[str, Any]:
    """Summarize, for each such field of a model, the values of that name."""
    return {
        name: summary(getattr(value, name) for value in values)
        for name, kind in get_type_hints(model).items()
        if kind is Summary and name not in but
    }


def _by_cause(pauses: Iterable[Pause]) -> dict[str, CauseFigures]:
    groups: dict[str, list[Pause]] = {}
    for pause in pauses:
        groups.setdefault(pause.main_cause or "unknown", []).append(pause)
    return {
        cause: CauseFigures(pauses=len(group), **_summaries(CauseFigures, group))
        for cause, group in sorted(groups.items())
    }


def _stops(rows: Sequence[Stop]) -> StopsFigures:
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


def _nsys(report: Report) -> NsysFigures | None:
    if not report.profiles:
        return None
    seen = [row.nsys for row in report.pauses if row.nsys is not None]
    return NsysFigures(
        profiles=tuple(map(_profile, report.profiles)),
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


# --- the schema, and the reference page -----------------------------------------------------------

Schema = dict[str, Any]


def schema() -> Schema:
    """Return the JSON Schema (2020-12) of figures.json: all fields required, no others."""
    parts: dict[str, Schema] = msgspec.json.schema(Figures)["$defs"]
    for kind in _kinds(Figures):
        part = parts[kind.__name__]
        properties = part["properties"]
        part["properties"] = {
            f.name: {
                **{key: value for key, value in properties[f.name].items() if key != "default"},
                "description": f.metadata["meaning"],
            }
            for f in fields(kind)
        }
        part["required"] = list(properties)
    for part in parts.values():
        part["additionalProperties"] = False
    dialect = "https://json-schema.org/draft/2020-12/schema"
    whole = {**parts.pop("Figures"), "title": "figures.json"}
    return {"$schema": dialect, **whole, "$defs": parts}


def _kinds(kind: Any) -> set[Any]:
    """Return all dataclasses that values of a type can contain."""
    inner = get_type_hints(kind).values() if is_dataclass(kind) else get_args(kind)
    own = {kind} if is_dataclass(kind) else set()
    return own.union(*map(_kinds, inner))


def schema_text() -> str:
    """Return the schema as printed."""
    return json.dumps(schema(), indent=2) + "\n"


def reference() -> str:
    """Return the fields as Markdown, for the end of docs/figures.md."""
    whole = schema()
    parts = [_table("figures.json", whole["properties"])]
    parts += [_table(name, part["properties"]) for name, part in sorted(whole["$defs"].items())]
    return "\n".join(parts)


def _table(title: str, properties: dict[str, Schema]) -> str:
    lines = [f"## {title}", "", "| field | type | meaning |", "| --- | --- | --- |"]
    for name, part in properties.items():
        description = part["description"].replace("|", "\\|")
        lines.append(f"| `{name}` | {_type(part)} | {description} |")
    return "\n".join([*lines, ""])


def _type(part: Schema) -> str:
    if "$ref" in part:
        name = part["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in part:
        return " or ".join(_type(p) for p in part["anyOf"])
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if part.get("type") == "array":
        return f"list of {_type(part['items'])}" if "items" in part else "list"
    return str(part.get("type", "object"))
