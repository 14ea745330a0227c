"""What figures.json holds, for programs: JSON Schema. For people: :mod:`.reference`.

Rows are described where they are defined: in the docstrings of their dataclasses, which are read
here, so that a field without words is found by a test.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydroslurm.report.accounting import SlurmLife
from hydroslurm.report.clocks import HostClock
from hydroslurm.report.figures import MOST_ROWS, SCHEMA
from hydroslurm.report.goodput import Goodput
from hydroslurm.report.pauses import Pause
from hydroslurm.report.rows import Profiled, StopRow
from hydroslurm.report.stops import Stop

Schema = dict[str, Any]


def schema() -> Schema:
    """JSON Schema (2020-12) of figures.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "figures.json",
        **_closed(_top()),
        "$defs": {
            "summary": _summary(),
            "cause": _closed(_cause()),
            "pause": _closed(_pause()),
            "profiled_pause": _closed(_fields(Profiled)),
            "stops": _closed(_stops()),
            "stop": _closed(_stop()),
            "goodput": _closed(_fields(Goodput)),
            "clocks": _closed(_clocks()),
            "host_clock": _closed(_fields(HostClock)),
            "slurm": _closed(_slurm()),
            "slurm_life": _closed(_fields(SlurmLife)),
            "nsys": _closed(_nsys()),
            "profile": _closed(_profile()),
        },
    }


def schema_text() -> str:
    """The schema as it is printed."""
    return json.dumps(schema(), indent=2) + "\n"


def _top() -> dict[str, Schema]:
    count, seconds = _number("integer"), _number("number")
    return {
        "schema": {"const": SCHEMA, "description": "Version of this form."},
        "run": {"type": "string", "description": "Name of the run folder."},
        "job_ids": _list({"type": "integer"}, "Slurm's; empty outside of a job."),
        "ranks": count("Ranks that wrote events."),
        "lives": count("Processes over all ranks and requeues."),
        "restarts": count("How often the job was requeued."),
        "begin_epoch_s": seconds("The run's first event, seconds since 1970."),
        "observed_s": seconds("From the first event to the last."),
        "events": count("Lines that were read."),
        "pauses": count("Pauses, those included that are not complete."),
        "incomplete": count("Of those, the ones that miss a line."),
        "stop_requests": count("Requests to save and leave; two for one preemption are normal."),
        "parked_total_s": seconds("Parked time of all ranks added up."),
        "in_flight": count(
            "Pauses in which collectives were in flight when all ranks were parked."
        ),
        "park_us": _ref("summary", "Request -> parked, µs."),
        "all_parked_us": _ref("summary", "Request -> all ranks parked, µs; several ranks only."),
        "drain_us": _ref("summary", "Parked -> devices idle, µs; accelerators only."),
        "resume_us": _ref("summary", "Resume request -> running, µs."),
        "parked_s": _ref("summary", "Parked time, s."),
        "asked_us": _ref("summary", "Signal of one rank -> another rank was told, µs."),
        "save_ms": _ref("summary", "Start of a save -> committed on the durable tier, ms."),
        "by_cause": {
            "type": "object",
            "additionalProperties": {"$ref": "#/$defs/cause"},
            "description": (
                "Cause -> its pauses. A pause counts under its first cause; `peers` only where it "
                "has no other, `unknown` when that was lost."
            ),
        },
        "every_pause": _rows("pause", "One object per pause, by rank, then time."),
        "every_pause_left_out": count(f"Pauses beyond the first {MOST_ROWS:,}."),
        "stops": _ref("stops", "The lives that were stopped, and how the run went on."),
        "goodput": _nullable("goodput", "Where the time went; null without events."),
        "clocks": _ref("clocks", "How times of several processes were lined up."),
        "slurm": _ref("slurm", "What Slurm's accounting said."),
        "nsys": _nullable("nsys", "What nsys recorded; null without a profile."),
        "missing": _list({"type": "string"}, "What could not be read or learned, in sentences."),
    }


def _summary() -> Schema:
    count, value = _number("integer"), _number("number")
    names = {
        "count": count("Values that were measured. With 0 the others are absent."),
        "p50": value("Median, by nearest rank: a value that was measured."),
        "p99": value("99th percentile; of fewer than 100 values the largest."),
        "max": value("Largest."),
    }
    return {
        "type": "object",
        "properties": names,
        "required": ["count"],
        "additionalProperties": False,
    }


def _cause() -> dict[str, Schema]:
    return {
        "pauses": _number("integer")("How many."),
        "park_us": _ref("summary", "Request -> parked, µs."),
        "resume_us": _ref("summary", "Resume request -> running, µs."),
        "parked_s": _ref("summary", "Parked time, s."),
    }


def _pause() -> dict[str, Schema]:
    some = _number("number", "null")
    return {
        **_fields(Pause),
        "outcome": {
            "enum": ["complete", "withdrawn", "not resumed", "not parked", "incomplete"],
            "description": "What became of it; `withdrawn`: resumed before it had parked.",
        },
        "at_s": some("From the run's first event to the request."),
        "pid": _number("integer")("Of the rank."),
        "asked_us": some("Signal of the rank that was signalled -> this rank was told, µs."),
        "stopped_us": some("Request -> SIGSTOP, µs, as the site's suspend grace has it."),
        "nsys": _nullable("profiled_pause", "The same pause by nsys."),
    }


def _stops() -> dict[str, Schema]:
    count = _number("integer")
    return {
        "count": count("Stops of all ranks; killed lives that were followed by another included."),
        "incomplete": count("Those whose log misses something."),
        "killed": count("Those that left without a word."),
        "by_reason": {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "description": "What ended them -> number; how they left, where Slurm did not say why.",
        },
        "safe_point_ms": _ref("summary", "Request -> end of the step that was being made, ms."),
        "staged_ms": _ref("summary", "Request -> the state is copied, ms."),
        "written_ms": _ref("summary", "Request -> the files are on the durable tier, ms."),
        "durable_ms": _ref("summary", "Request -> committed on the durable tier, ms."),
        "requeued_ms": _ref("summary", "Request -> in Slurm's queue again, ms."),
        "eligible_s": _ref("summary", "End of the job's life -> eligible, s, by Slurm."),
        "queued_s": _ref("summary", "Eligible -> started, s, by Slurm."),
        "start_s": _ref("summary", "Started by Slurm -> the process's first event, s."),
        "waited_s": _ref("summary", "Last event -> the next life's first event, s."),
        "first_step_s": _ref("summary", "That first event -> end of its first step, s."),
        "steps_lost_total": count("Steps made again; of the rank that lost the most."),
        "samples_lost_total": _number("integer", "null")("Samples of these; null: not told."),
        "at_least": {"type": "boolean", "description": "True where more may have been lost."},
        "every_stop": _rows("stop", "One object per stop, by rank, then time."),
        "every_stop_left_out": count(f"Stops beyond the first {MOST_ROWS:,}."),
    }


def _stop() -> dict[str, Schema]:
    own = {
        name: part
        for name, part in _fields(StopRow).items()
        if name not in ("stopped", "before", "after")
    }
    return {
        **_fields(Stop),
        **own,
        "slurm_before": _nullable("slurm_life", "Slurm's life that was stopped."),
        "slurm_after": _nullable("slurm_life", "The one that went on."),
    }


def _clocks() -> dict[str, Schema]:
    some = _number("integer", "null")
    return {
        "error_ns": some("Of any two moments of the run; null: not known."),
        "within_ns": some("Of two moments of one process; null: too few events to tell."),
        "between_ns": some("Of two hosts' dates; null with one host, or where nothing bounds it."),
        "hosts": _rows("host_clock", "Hosts beside the first rank's."),
        "words": {"type": "string", "description": "The same, for people."},
    }


def _slurm() -> dict[str, Schema]:
    return {
        "suspend_grace_s": _number("integer", "null")("Between SIGTSTP and SIGSTOP on this site."),
        "lives": _rows("slurm_life", "Lives of the run's jobs; empty where Slurm was not asked."),
    }


def _nsys() -> dict[str, Schema]:
    return {
        "profiles": _rows("profile", "The reports that were read."),
        "joined": _number("integer")("Pauses that log and profiles both hold."),
        "park_us": _ref("summary", "Request -> the last thread was put to sleep, µs."),
        "resume_us": _ref("summary", "Resume request -> the first thread ran, µs."),
        "last_kernel_us": _ref("summary", "Request -> end of the last kernel before it, µs."),
        "first_kernel_us": _ref("summary", "Resume request -> first kernel after it, µs."),
        "difference_us": _ref("summary", "Largest difference to the log's latencies, µs."),
    }


def _profile() -> dict[str, Schema]:
    return {
        "path": {"type": "string", "description": "Where it was read."},
        "host": {"type": ["string", "null"], "description": "Where it was made."},
        "pids": _list({"type": "integer"}, "Processes with marks of hydroslurm."),
        "pauses": _number("integer")("Pauses in it."),
        "stops": _number("integer")("Stops in it."),
        "error_us": _number("number", "null")("Of its clock against the log's, µs."),
    }


def _fields(kind: type[Any]) -> dict[str, Schema]:
    """Of a flat dataclass: types from its annotations, words from its docstring."""
    hints, words = get_type_hints(kind), described(kind)
    return {
        one.name: {**_type(hints[one.name]), "description": words.get(one.name, "")}
        for one in dataclasses.fields(kind)
    }


def described(kind: type[Any]) -> dict[str, str]:
    """Attribute -> its words in the docstring; several may share them: ``a, b: words``."""
    _, _, attributes = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + attributes):
        names, colon, text = entry.strip().partition(": ")
        if colon and re.fullmatch(r"[\w*]+(, [\w*]+)*", names):
            sentence = " ".join(text.split()).replace("``", "`").replace(":attr:", "")
            for name in names.split(", "):
                found[name] = sentence[:1].upper() + sentence[1:]
    return found


def _type(hint: Any) -> Schema:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    names: list[str] = []
    for part in parts:
        if get_origin(part) is Literal:
            return {"enum": [*get_args(part), *([None] if type(None) in parts else [])]}
        if get_origin(part) is tuple:
            return {"type": "array", "items": _type(get_args(part)[0])}
        names.append(_NAMES.get(part, "object"))
    return {"type": names[0] if len(names) == 1 else names}


_NAMES = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}


def _closed(properties: dict[str, Schema]) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _number(*kinds: str) -> Any:
    return lambda words: {"type": kinds[0] if len(kinds) == 1 else [*kinds], "description": words}


def _list(items: Schema, words: str) -> Schema:
    return {"type": "array", "items": items, "description": words}


def _rows(name: str, words: str) -> Schema:
    return _list({"$ref": f"#/$defs/{name}"}, words)


def _ref(name: str, words: str) -> Schema:
    return {"$ref": f"#/$defs/{name}", "description": words}


def _nullable(name: str, words: str) -> Schema:
    return {"anyOf": [{"$ref": f"#/$defs/{name}"}, {"type": "null"}], "description": words}
