"""A run's pauses and stops as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hydroslurm.report.figures import figures_of
from hydroslurm.report.history import History
from hydroslurm.report.pauses import PEERS, Life, Pause
from hydroslurm.report.stops_table import stop_sentences, stops_summary, stops_table

_UNKNOWN = "–"


def report_view(history: History, *, max_rows: int = 40) -> RenderableType:
    """The tables of pauses and of stops, each with its percentiles below; one sentence when there
    was neither."""
    figures = figures_of(history)
    heading = Text(_heading(figures), style="bold")
    if not history.lives:
        why = "No events yet: the job has not started, or pausing was never installed in it."
        return Group(heading, Text(why))
    parts: list[RenderableType] = [heading, *_about_pauses(history, figures, max_rows)]
    if history.stopped:
        parts += _about_stops(history, figures, max_rows)
    elif not history.pauses:
        parts.append(Text("Nothing was paused."))
    return Group(*parts)


def pauses_table(history: History, *, max_rows: int = 40) -> Table:
    """One row per pause: the first ``max_rows`` in order of time."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    # narrow headings: a terminal of 80 columns must have room for the operator
    for name in ("at\n(s)", "rank", "pause"):
        table.add_column(name, justify="right")
    table.add_column("cause")
    together = any(life.world_size > 1 for life in history.lives)
    all_parked = ["all\nparked\n(ms)"] if together else []
    for name in ("signal →\nparked\n(µs)", *all_parked, "parked\n(s)", "resume →\nrunning\n(µs)"):
        table.add_column(name, justify="right")
    table.add_column("held at", overflow="fold")
    for at_s, life, pause in _in_time(history)[:max_rows]:
        table.add_row(
            f"{at_s:.2f}",
            f"{life.rank}",
            _number_of(history, life, pause),
            _causes(pause),
            _number(pause.park_us, ",.0f"),
            *([_all_parked(pause)] if together else []),
            _number(pause.parked_s, ".3f"),
            _number(pause.resume_us, ",.0f"),
            _held_at(pause),
        )
    if history.several_lives:
        table.caption = "pause 2.1: the first pause of the second life, after a requeue"
    return table


def summary_table(figures: Mapping[str, Any]) -> Table:
    """p50, p99 and max of each latency that was measured."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("over all pauses")
    for name in ("count", "p50", "p99", "max"):
        table.add_column(name, justify="right")
    for label, key, form in (
        ("signal → parked (µs)", "park_us", ",.0f"),
        ("signal → all ranks parked (µs)", "all_parked_us", ",.0f"),
        ("parked → devices idle (µs)", "drain_us", ",.0f"),
        ("parked (s)", "parked_s", ".3f"),
        ("resume → running (µs)", "resume_us", ",.0f"),
    ):
        summary = figures[key]
        if summary["count"]:
            values = [format(summary[name], form) for name in ("p50", "p99", "max")]
            table.add_row(label, str(summary["count"]), *values)
    return table


def _about_pauses(
    history: History, figures: Mapping[str, Any], max_rows: int
) -> list[RenderableType]:
    if not history.pauses:
        return []
    parts: list[RenderableType] = [pauses_table(history, max_rows=max_rows)]
    left_out = len(history.pauses) - max_rows
    if left_out > 0:
        parts.append(Text(f"{left_out} later pauses are left out; the figures below are of all."))
    return [*parts, summary_table(figures), *map(Text, _together_sentences(history, figures))]


def _together_sentences(history: History, figures: Mapping[str, Any]) -> list[str]:
    """What a suspend could have found in the middle of something."""
    said = []
    if in_flight := figures["in_flight"]:
        said.append(
            f"{_counted(in_flight, 'pause')} with collectives in flight (! above): such a suspend "
            "has to be shorter than their time-out."
        )
    alone = sum(
        pause.all_parked_us is None and pause.parked_mono_ns is not None
        for life in history.lives
        if life.world_size > 1
        for pause in life.pauses
    )
    if alone:
        said.append(f"{_counted(alone, 'pause')} ended before all ranks were parked.")
    return said


def _about_stops(
    history: History, figures: Mapping[str, Any], max_rows: int
) -> list[RenderableType]:
    parts: list[RenderableType] = [stops_table(history, max_rows=max_rows)]
    left_out = len(history.stopped) - max_rows
    if left_out > 0:
        parts.append(Text(f"{left_out} later stops are left out; the figures below are of all."))
    sentences = [Text(sentence) for sentence in stop_sentences(history, figures)]
    return [*parts, stops_summary(figures), *sentences]


def _heading(figures: Mapping[str, Any]) -> str:
    jobs = ", ".join(map(str, figures["job_ids"]))
    parts = [
        f"run {figures['run']}",
        f"job {jobs}" if jobs else "no Slurm job",
        _counted(figures["ranks"], "rank"),
        f"observed {figures['observed_s']:.1f} s",
    ]
    if figures["restarts"]:
        parts.append(_counted(figures["restarts"], "requeue"))
    if figures["stops"]["count"]:
        parts.append(_counted(figures["stops"]["count"], "stop"))
    return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _in_time(history: History) -> list[tuple[float, Life, Pause]]:
    rows = [
        (history.since_begin_s(life, pause.begin_mono_ns), life, pause)
        for life in history.lives
        for pause in life.pauses
        if pause.begin_mono_ns is not None
    ]
    return sorted(rows, key=lambda row: (row[0], row[1].rank))


def _number_of(history: History, life: Life, pause: Pause) -> str:
    own = str(pause.number)
    return f"{history.life_number(life)}.{own}" if history.several_lives else own


def _causes(pause: Pause) -> str:
    """Its own; that the peers' cause joined them goes without saying."""
    own = [cause for cause in pause.causes if cause != PEERS]
    return "+".join(own or pause.causes) or _UNKNOWN


def _all_parked(pause: Pause) -> str:
    if pause.all_parked_us is None:
        return f"{_UNKNOWN} !" if pause.in_flight else _UNKNOWN
    return f"{pause.all_parked_us / 1e3:,.1f}{' !' if pause.in_flight else ''}"


def _held_at(pause: Pause) -> str:
    """Where the rank was held, or what is wrong with this pause."""
    if pause.outcome == "incomplete":
        return f"lost: {', '.join(pause.missing)}"
    if not pause.complete:
        return pause.outcome
    if pause.operator is None:
        return "(quiet)"
    # autograd's own are called "autograd::engine::evaluate_function: AddmmBackward0"
    operator = pause.operator.rpartition(": ")[2]
    return f"{operator} (backward)" if pause.phase == "backward" else operator


def _number(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)
