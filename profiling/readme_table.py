"""The figures in docs/performance.md, and the headlines of README: made from
profiling/results/*.json, and from nowhere else."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"

Results = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure of a script, its goal, and the incumbent's beside it."""

    script: str
    key: str
    unit: str
    goal: str
    incumbent_key: str
    what: str


_TEXT = Path(__file__).with_name("figures.csv").read_text()
ROWS = tuple(Row(**row) for row in csv.DictReader(_TEXT.splitlines()))
HEADLINES = (
    ("overhead", "ratio_installed"),
    ("pause_latency", "pause_us_p50"),
    ("suspend_latency", "command_to_parked_ms_p50"),
    ("stop", "sigterm_to_durable_ms_p50"),
    ("finish", "minutes_hydroslurm"),
    ("long_suspend", "continued_ddp"),
)
"""The rows of README, by script and key."""


def load(folder: Path) -> Results:
    """Script name -> what it printed, of those that were measured in full."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: result for name, result in found.items() if not result["quick"]}


def kept(script: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of a script's result: the figures of the table, and where they were measured; of
    a script that has no figure there, all."""
    wanted = {key for row in ROWS if row.script == script for key in (row.key, row.incumbent_key)}
    if not wanted:
        return dict(result)
    wanted |= {"script", "quick", "environment"}
    return {key: value for key, value in result.items() if key in wanted}


def table(results: Results) -> str:
    """The rows that there are results for, as Markdown, with where they were measured."""
    lines = [
        "| what | hydroslurm | goal | peer | script |",
        "| --- | --- | --- | --- | --- |",
    ]
    used: dict[str, None] = {}
    for row in ROWS:
        result = results.get(row.script, {})
        value = result.get(row.key)
        if value is None:
            continue
        used[_measured_on(result)] = None
        theirs = _text(result.get(row.incumbent_key), row.unit)
        ours = _text(value, row.unit)
        lines.append(f"| {row.what} | {ours} | {row.goal} | {theirs} | `{result['script']}` |")
    return "\n".join([*lines, "", *(f"Measured {place}." for place in used)])


def headlines(results: Results) -> str:
    """README's few rows, as Markdown."""
    rows = {(row.script, row.key): row for row in ROWS}
    lines = ["| what | hydroslurm | peer |", "| --- | --- | --- |"]
    for script, key in HEADLINES:
        row, result = rows[script, key], results.get(script, {})
        if result.get(key) is not None:
            theirs = _text(result.get(row.incumbent_key), row.unit) or "–"
            lines.append(f"| {row.what} | {_text(result[key], row.unit)} | {theirs} |")
    return "\n".join(lines)


def replace_between(text: str, block: str, *, begin: str = BEGIN, end: str = END) -> str:
    """``text`` with what is between the two markers replaced."""
    head, begins, rest = text.partition(begin)
    _, ends, tail = rest.partition(end)
    if not begins or not ends or begin in rest or end in tail:
        raise ValueError(f"wanted one {begin!r} and after it one {end!r} in the text")
    return f"{head}{begin}\n{block}\n{end}{tail}"


def _text(value: Any, unit: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) and not value.is_integer() else f"{value:g}"
    return f"{text} {unit}".strip()


def _measured_on(result: Mapping[str, Any]) -> str:
    where = result["environment"]
    return (
        f"{where['date']} on {where['cpu_count']} cores of {where['cpu_model']}, "
        f"Python {where['python']}, torch {where['torch']}"
    )
