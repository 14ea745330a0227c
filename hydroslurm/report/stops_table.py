"""A run's stops as a table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from hydroslurm.report.history import History
from hydroslurm.report.sheets.core import UNKNOWN, plain
from hydroslurm.report.sheets.stops import lost, why
from hydroslurm.report.stops import KILLED, Stop, Stopped


def stops_table(history: History, *, max_rows: int = 40) -> Table:
    """One row per stop: the first ``max_rows`` in order of time. Fits into 80 columns."""
    # one blank between columns: there are eleven, and a terminal has 80
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0)
    for name in ("at\n(s)", "rank", "life"):
        table.add_column(name, justify="right")
    table.add_column("stopped by", overflow="fold", min_width=12)
    for name in (
        "safe\npoint\n(ms)",
        "saved\n(ms)",
        "re-\nqueued\n(ms)",
        "next\nlife\n(s)",
        "first\nstep\n(s)",
        "at\nstep",
        "steps\nlost",
    ):
        table.add_column(name, justify="right")
    for stopped in in_time(history)[:max_rows]:
        stop = stopped.stop
        table.add_row(
            _moment(_at_s(history, stopped)),
            f"{stop.rank}",
            f"{history.life_number(stopped.life)}",
            why(stop),
            plain(stop.safe_point_ms, ",.0f"),
            _saved(stop),
            plain(stop.requeued_ms, ",.0f"),
            plain(stop.waited_s, ".1f"),
            plain(stop.first_step_s, ".1f"),
            _step(stop),
            lost(stop),
        )
    return table


def stops_summary(figures: Mapping[str, Any]) -> Table:
    """p50, p99 and max of what a stop takes, of what was measured."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, collapse_padding=True)
    table.add_column("over all stops")
    for name in ("count", "p50", "p99", "max"):
        table.add_column(name, justify="right")
    for label, key, form in (
        ("signal → safe point (ms)", "safe_point_ms", ",.1f"),
        ("signal → state copied (ms)", "staged_ms", ",.1f"),
        ("signal → committed (ms)", "durable_ms", ",.1f"),
        ("signal → requeued (ms)", "requeued_ms", ",.1f"),
        ("end → next life (s)", "waited_s", ".2f"),
        ("next life → first step (s)", "first_step_s", ".2f"),
    ):
        summary = figures["stops"][key]
        if summary["count"]:
            values = [format(summary[name], form) for name in ("p50", "p99", "max")]
            table.add_row(label, str(summary["count"]), *values)
    return table


def stop_sentences(history: History, figures: Mapping[str, Any], *, most: int = 5) -> list[str]:
    """What was lost, and what the log does not tell."""
    stops = figures["stops"]
    least = "at least " if stops["at_least"] else ""
    said = [f"Steps lost: {least}{stops['steps_lost_total']}."]
    torn = [one for one in in_time(history) if not one.stop.complete]
    for one in torn[:most]:
        who = f"Life {history.life_number(one.life)} of rank {one.stop.rank}"
        if one.stop.left == KILLED and one.stop.requested_mono_ns is None:
            said.append(f"{who} was killed without a word.")
        else:
            said.append(f"{who} wrote no {', '.join(one.stop.missing)}.")
    if len(torn) > most:
        said.append(f"{len(torn) - most} more stops are incomplete: see figures.json.")
    for one in in_time(history):
        if one.stop.requeue_error:
            said.append(f"Not requeued by rank {one.stop.rank}: {one.stop.requeue_error}")
    return said


def in_time(history: History) -> list[Stopped]:
    """The stops of all ranks in order of time."""
    return sorted(history.stopped, key=lambda one: (_at_s(history, one), one.stop.rank))


def _at_s(history: History, stopped: Stopped) -> float:
    return history.since_begin_s(stopped.life, stopped.begin_mono_ns)


def _moment(at_s: float) -> str:
    return f"{at_s:.1f}" if at_s < 10_000 else f"{at_s:.0f}"


def _saved(stop: Stop) -> str:
    if stop.durable_ms is None and stop.fast_ms is not None:
        return f"{stop.fast_ms:,.0f} fast"
    return plain(stop.durable_ms, ",.0f")


def _step(stop: Stop) -> str:
    if stop.step is None:
        return UNKNOWN
    return f"{'≥ ' if stop.step_from == 'last_event' else ''}{stop.step:,}"
