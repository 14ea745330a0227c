"""A run's pauses as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from hydroslurm.report.history import History
from hydroslurm.report.pauses import Life, Pause
from hydroslurm.report.sheets.core import UNKNOWN, plain
from hydroslurm.report.sheets.pauses import causes, held_at, pause_number


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
    for at_s, life, pause in pauses_in_order(history)[:max_rows]:
        table.add_row(
            f"{at_s:.2f}",
            f"{life.rank}",
            pause_number(history, life, pause),
            causes(pause),
            plain(pause.park_us, ",.0f"),
            *([_all_parked(pause)] if together else []),
            plain(pause.parked_s, ".3f"),
            plain(pause.resume_us, ",.0f"),
            held_at(pause),
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


def pauses_in_order(history: History) -> list[tuple[float, Life, Pause]]:
    """Of all ranks, with the seconds since the run's begin; one without any stamp is left out."""
    rows = [
        (history.since_begin_s(life, pause.begin_mono_ns), life, pause)
        for life in history.lives
        for pause in life.pauses
        if pause.begin_mono_ns is not None
    ]
    return sorted(rows, key=lambda row: (row[0], row[1].rank))


def _all_parked(pause: Pause) -> str:
    if pause.all_parked_us is None:
        return f"{UNKNOWN} !" if pause.in_flight else UNKNOWN
    return f"{pause.all_parked_us / 1e3:,.1f}{' !' if pause.in_flight else ''}"
