"""Sheets of stops: why and what it cost, and link by link. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from hydroslurm.report.history import History
from hydroslurm.report.rows import StopRow
from hydroslurm.report.sheets.core import UNKNOWN, Column, Sheet, form, sheet_of
from hydroslurm.report.stops import KILLED, Stop


def stops_sheet(history: History, rows: Sequence[StopRow], *, most: int) -> Sheet:
    """Why each life was stopped, and what that cost."""
    columns: list[Column[StopRow]] = [
        Column("life", lambda row: stop_name(history, row), always=True),
        Column("stopped by", lambda row: why(row.stop), always=True),
        Column("signal", lambda row: row.stop.signal),
        Column("at (s)", lambda row: f"{row.at_s:,.1f}", always=True),
        Column("at step", lambda row: form(row.stop.step, 1, ",d")),
        Column("steps lost", lambda row: lost(row.stop), always=True),
        Column("state (MB)", lambda row: form(row.stop.state_bytes, 1e6, ",.1f")),
        Column("not in the log", lambda row: ", ".join(row.stop.missing) or None),
    ]
    return sheet_of("Stops", columns, rows, most=most, words=3)


def stop_chains(history: History, rows: Sequence[StopRow], *, most: int) -> Sheet:
    """Each stop from the request to the next life's first step."""
    columns: list[Column[StopRow]] = [
        Column("life", lambda row: stop_name(history, row), always=True),
        Column("safe point (ms)", lambda row: form(row.stop.safe_point_ms, 1, ",.0f")),
        Column("staged (ms)", lambda row: form(row.stop.staged_ms, 1, ",.0f")),
        Column("written (ms)", lambda row: form(row.stop.written_ms, 1, ",.0f")),
        Column("commit (ms)", lambda row: form(row.stop.durable_ms, 1, ",.0f"), always=True),
        Column("requeue (ms)", lambda row: form(row.stop.requeued_ms, 1, ",.0f")),
        Column("left (ms)", lambda row: form(row.left_s, 1e-3, ",.0f")),
        Column("eligible (s)", lambda row: form(row.eligible_s, 1, ".0f")),
        Column("start (s)", lambda row: form(row.queued_s, 1, ".0f")),
        Column("runs (s)", lambda row: form(row.start_s, 1, ".1f")),
        Column("first step (s)", lambda row: form(row.stop.first_step_s, 1, ".1f")),
        Column("steps lost", lambda row: lost(row.stop)),
        Column("samples lost", lambda row: form(row.samples_lost, 1, ",d")),
    ]
    note = (
        "Up to left: from the request. Then each from the link before: eligible, from the end of "
        "the job's life; start by Slurm; runs, the process's first event; its first step. Slurm's "
        "moments are whole seconds."
    )
    return sheet_of("Stops, link by link", columns, rows, most=most, note=note)


def profiled_stops(history: History, rows: Sequence[StopRow], *, most: int) -> Sheet:
    """The log's latencies beside those of nsys."""
    seen = [
        row for row in rows if row.nsys_saving_ms is not None or row.nsys_requeued_ms is not None
    ]
    columns: list[Column[StopRow]] = [
        Column("life", lambda row: stop_name(history, row), always=True),
        Column("saving, nsys (ms)", lambda row: form(row.nsys_saving_ms, 1, ",.1f"), always=True),
        Column("commit (ms)", lambda row: form(row.stop.durable_ms, 1, ",.1f"), always=True),
        Column(
            "commit, nsys (ms)", lambda row: form(row.nsys_committed_ms, 1, ",.1f"), always=True
        ),
        Column("requeue (ms)", lambda row: form(row.stop.requeued_ms, 1, ",.1f")),
        Column("requeue, nsys (ms)", lambda row: form(row.nsys_requeued_ms, 1, ",.1f")),
    ]
    note = "All from the request, which is the moment in the signal's handler."
    return sheet_of("Stops by the log and by nsys", columns, seen, most=most, note=note)


def stop_name(history: History, row: StopRow) -> str:
    return f"r{row.stop.rank} {history.life_number(row.stopped.life)}"


def why(stop: Stop) -> str:
    """In Slurm's view, and what became of it where that is something else."""
    if stop.left == KILLED:
        return f"{stop.reason}, killed" if stop.reason else KILLED
    if stop.reason in (None, "unknown"):
        told = stop.left if stop.of_rank is None else f"rank {stop.of_rank}"
        return stop.signal or told
    return f"{stop.reason}, {stop.left}" if stop.left == "finished" else str(stop.reason)


def lost(stop: Stop) -> str:
    if stop.steps_lost is None:
        return UNKNOWN
    return f"{'' if stop.steps_lost_exactly else '≥ '}{stop.steps_lost:,}"
