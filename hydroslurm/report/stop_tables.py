"""The tables of a run's stops: in rows and link by link. Pure.

``wide`` tables, for the page, have columns for which a terminal has no room.
"""

from __future__ import annotations

from collections.abc import Sequence

from hydroslurm.report.history import History
from hydroslurm.report.rows import StopRow
from hydroslurm.report.stops import KILLED, Stop
from hydroslurm.report.tables import UNKNOWN, Column, Table, number, table_of


def stops_table(
    history: History, rows: Sequence[StopRow], *, most: int = 40, wide: bool = False
) -> Table:
    """Why each attempt was stopped, how fast it was saved, and what was lost."""
    columns: list[Column[StopRow]] = [
        Column("at\n(s)", lambda row: f"{row.at_s:.1f}" if row.at_s < 1e4 else f"{row.at_s:.0f}"),
        Column("rank", lambda row: str(row.rank)),
        Column("attempt", lambda row: str(history.attempt_number(row.stopped))),
        Column("stopped by", lambda row: _why(row), left=True),
        Column("signal", lambda row: row.signal, optional=True, left=True, wide=True),
        Column("safe\npoint\n(ms)", lambda row: number(row.safe_point_ms, ",.0f")),
        Column("saved\n(ms)", lambda row: number(row.durable_ms, ",.0f")),
        Column("re-\nqueued\n(ms)", lambda row: number(row.requeued_ms, ",.0f")),
        Column("next\nbegan\n(s)", lambda row: number(row.waited_s, ".1f")),
        Column("first\nstep\n(s)", lambda row: number(row.first_step_s, ".1f")),
        Column("at\nstep", lambda row: _step(row)),
        Column("steps\nlost", lambda row: lost(row)),
        Column(
            "state (MB)", lambda row: number(row.state_bytes, ",.1f", 1e6), optional=True, wide=True
        ),
        Column(
            "not in the log",
            lambda row: ", ".join(row.missing) or None,
            optional=True,
            left=True,
            wide=True,
        ),
    ]
    return table_of("Stops", columns, rows, most=most, wide=wide)


def stop_chains(history: History, rows: Sequence[StopRow], *, most: int) -> Table:
    """Each stop from the request to the next attempt's first step."""
    columns: list[Column[StopRow]] = [
        _stop_column(history),
        Column("safe point (ms)", lambda row: number(row.safe_point_ms, ",.0f"), optional=True),
        Column("written (ms)", lambda row: number(row.written_ms, ",.0f"), optional=True),
        Column("commit (ms)", lambda row: number(row.durable_ms, ",.0f")),
        Column("requeue (ms)", lambda row: number(row.requeued_ms, ",.0f"), optional=True),
        Column("left (ms)", lambda row: number(row.left_s, ",.0f", 1e-3), optional=True),
        Column("eligible (s)", lambda row: number(row.eligible_s, ".0f"), optional=True),
        Column("start (s)", lambda row: number(row.queued_s, ".0f"), optional=True),
        Column("runs (s)", lambda row: number(row.start_s, ".1f"), optional=True),
        Column("first step (s)", lambda row: number(row.first_step_s, ".1f"), optional=True),
        Column("steps lost", lambda row: lost(row), optional=True),
        Column("samples lost", lambda row: number(row.samples_lost, ",d"), optional=True),
    ]
    note = (
        "Up to left: from the request. After that, each from the link before: eligible, from the "
        "end of the job's attempt; start by Slurm; runs, the process's first event; its first "
        "step. Slurm's times are whole seconds."
    )
    return table_of("Stops, link by link", columns, rows, most=most, note=note)


def profiled_stops(history: History, rows: Sequence[StopRow], *, most: int) -> Table:
    """The log's latencies next to those of nsys."""
    seen = [
        row for row in rows if row.nsys_saving_ms is not None or row.nsys_requeued_ms is not None
    ]
    columns: list[Column[StopRow]] = [
        _stop_column(history),
        Column("saving, nsys (ms)", lambda row: number(row.nsys_saving_ms, ",.1f")),
        Column("commit (ms)", lambda row: number(row.durable_ms, ",.1f")),
        Column("commit, nsys (ms)", lambda row: number(row.nsys_committed_ms, ",.1f")),
        Column("requeue (ms)", lambda row: number(row.requeued_ms, ",.1f"), optional=True),
        Column(
            "requeue, nsys (ms)", lambda row: number(row.nsys_requeued_ms, ",.1f"), optional=True
        ),
    ]
    note = "All from the request, the moment in the signal handler."
    return table_of("Stops by the log and by nsys", columns, seen, most=most, note=note)


def lost(stop: Stop) -> str:
    """Steps lost; a lower bound is shown as one."""
    if stop.steps_lost is None:
        return UNKNOWN
    return f"{'' if stop.steps_lost_exactly else '≥ '}{stop.steps_lost:,}"


def _stop_column(history: History) -> Column[StopRow]:
    return Column(
        "attempt",
        lambda row: f"r{row.rank} {history.attempt_number(row.stopped)}",
        left=True,
    )


def _why(stop: Stop) -> str:
    """Slurm's reason, and how the attempt ended where that differs."""
    if stop.left == KILLED:
        return f"{stop.reason}, killed" if stop.reason else KILLED
    if stop.reason in (None, "unknown"):
        told = stop.left if stop.of_rank is None else f"rank {stop.of_rank}"
        return stop.signal or told
    return f"{stop.reason}, {stop.left}" if stop.left == "finished" else str(stop.reason)


def _step(stop: Stop) -> str | None:
    if stop.step is None:
        return None
    return f"{'≥ ' if stop.step_from == 'last_event' else ''}{stop.step:,}"
