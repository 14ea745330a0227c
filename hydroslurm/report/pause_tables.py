"""The tables of a run's pauses: in rows and link by link. Pure.

``wide`` tables, for the page, have columns for which a terminal has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.history import History
from hydroslurm.report.lines import span
from hydroslurm.report.pauses import PEERS, Pause
from hydroslurm.report.rows import PauseRow
from hydroslurm.report.tables import UNKNOWN, Column, Table, number, table_of


def pauses_table(
    history: History, rows: Sequence[PauseRow], *, most: int = 40, wide: bool = False
) -> Table:
    """Why, how fast and for how long each pause held its rank, and where."""
    columns: list[Column[PauseRow]] = [
        Column("at\n(s)", lambda row: number(row.at_s, ",.2f" if wide else ".2f")),
        Column("rank", lambda row: str(row.attempt.rank)),
        Column("pause", lambda row: _pause_number(history, row.attempt, row.pause)),
        Column("cause", lambda row: _causes(row.pause), left=True),
        Column("signal", lambda row: row.pause.signal, optional=True, left=True, wide=True),
        Column("step", lambda row: number(row.pause.step, ",d"), optional=True, wide=True),
        Column("signal →\nparked\n(µs)", lambda row: number(row.pause.park_us, ",.0f")),
        Column("all\nparked\n(ms)", lambda row: _all_parked(row.pause), optional=True),
        Column("parked\n(s)", lambda row: number(row.pause.parked_s, ",.3f")),
        Column("resume →\nrunning\n(µs)", lambda row: number(row.pause.resume_us, ",.0f")),
        Column("held at", lambda row: _held_at(row.pause), left=True),
    ]
    note = ""
    if history.several_attempts and rows:
        note = "Pause 2.1 is the first pause of the second attempt, after a requeue."
    return table_of("Pauses", columns, rows, most=most, wide=wide, note=note)


def pause_chains(history: History, rows: Sequence[PauseRow], *, most: int) -> Table:
    """Each pause from the request to the first operator."""
    columns: list[Column[PauseRow]] = [
        _pause_column(history),
        Column("asked (ms)", lambda row: number(row.asked_us, ".2f", 1e3), optional=True),
        Column("closed (µs)", lambda row: _since(row.pause.closed_mono_ns, row), optional=True),
        Column("held (µs)", lambda row: _since(row.pause.held_mono_ns, row), optional=True),
        Column("parked (µs)", lambda row: number(row.pause.park_us, ",.0f")),
        Column(
            "all parked (ms)",
            lambda row: number(row.pause.all_parked_us, ",.1f", 1e3),
            optional=True,
        ),
        Column("drained (µs)", lambda row: number(row.pause.drain_us, ",.0f"), optional=True),
        Column("vacated (GB)", _vacated_gb, optional=True),
        Column("vacate (s)", lambda row: number(row.pause.vacate_s, ",.2f"), optional=True),
        Column("SIGSTOP (s)", lambda row: _about_s(row.stopped_us), optional=True),
        Column("resume (s)", _resume, optional=True),
        Column("restore (s)", lambda row: number(row.pause.restore_s, ",.2f"), optional=True),
        Column("opened (µs)", _opened, optional=True),
        Column("runs (µs)", lambda row: number(row.pause.resume_us, ",.0f")),
    ]
    note = (
        "All times are from the request, the moment in the signal handler, except: drained, from "
        "parked; opened and runs (the first operator), from the resume request."
    )
    if any(row.stopped_us is not None for row in rows):
        note += " SIGSTOP ≈: according to this site's suspend grace; no process sees that moment."
    if any(row.asked_us is not None for row in rows):
        note += " asked: from the request of the rank that was signalled until this one was told."
    return table_of("Pauses, link by link", columns, rows, most=most, note=note)


def profiled_pauses(history: History, rows: Sequence[PauseRow], *, most: int) -> Table:
    """The log's latencies next to those of nsys."""
    seen = [row for row in rows if row.profiled is not None]

    def nsys(name: str) -> Callable[[PauseRow], str | None]:
        return lambda row: number(getattr(row.profiled, name), ",.0f")

    columns: list[Column[PauseRow]] = [
        _pause_column(history),
        Column("parked (µs)", lambda row: number(row.pause.park_us, ",.0f")),
        Column("parked, nsys (µs)", nsys("park_us")),
        Column("last kernel (µs)", nsys("last_kernel_us"), optional=True),
        Column("drained, nsys (µs)", nsys("drain_us"), optional=True),
        Column("runs (µs)", lambda row: number(row.pause.resume_us, ",.0f")),
        Column("runs, nsys (µs)", nsys("resume_us")),
        Column("first kernel (µs)", nsys("first_kernel_us"), optional=True),
        Column("largest difference (µs)", nsys("difference_us")),
        Column("nsys clock ± (µs)", nsys("error_us")),
    ]
    return table_of("Pauses by the log and by nsys", columns, seen, most=most)


def _pause_column(history: History) -> Column[PauseRow]:
    return Column(
        "pause",
        lambda row: f"r{row.attempt.rank} {_pause_number(history, row.attempt, row.pause)}",
        left=True,
    )


def _pause_number(history: History, attempt: Attempt, pause: Pause) -> str:
    """With its attempt where there are several."""
    own = str(pause.number)
    return f"{history.attempt_number(attempt)}.{own}" if history.several_attempts else own


def _causes(pause: Pause) -> str:
    """Its own; that peers joined them goes without saying."""
    own = [cause for cause in pause.causes if cause != PEERS]
    return "+".join(own or pause.causes) or UNKNOWN


def _all_parked(pause: Pause) -> str | None:
    """Marked where collectives were in flight."""
    text = number(pause.all_parked_us, ",.1f", 1e3)
    return f"{text or UNKNOWN} !" if pause.in_flight else text


def _held_at(pause: Pause) -> str:
    """Where the rank was held, or what is wrong with this pause."""
    if pause.outcome == "incomplete":
        return f"lost: {', '.join(pause.missing)}"
    if not pause.complete:
        return pause.outcome
    if pause.operator is None:
        return "(quiet)"
    # autograd names its own "autograd::engine::evaluate_function: AddmmBackward0"
    operator = pause.operator.rpartition(": ")[2]
    return f"{operator} (backward)" if pause.phase == "backward" else operator


def _since(end_ns: int | None, row: PauseRow) -> str | None:
    return _between(row.pause.requested_mono_ns, end_ns, ",.0f", 1e3)


def _resume(row: PauseRow) -> str | None:
    pause = row.pause
    return _between(pause.requested_mono_ns, pause.resume_requested_mono_ns, ",.3f", 1e9)


def _vacated_gb(row: PauseRow) -> str | None:
    """Of device memory; a dash where the pause was to vacate and did not."""
    moved_bytes = row.pause.vacated_bytes
    if moved_bytes is None:
        return UNKNOWN if row.pause.not_vacated else None
    return f"{moved_bytes / 1e9:,.2f}"


def _opened(row: PauseRow) -> str | None:
    pause = row.pause
    return _between(pause.resume_requested_mono_ns, pause.resumed_mono_ns, ",.0f", 1e3)


def _between(begin_ns: int | None, end_ns: int | None, spec: str, unit_ns: float) -> str | None:
    return number(span(begin_ns, end_ns, unit_ns), spec)


def _about_s(stopped_us: float | None) -> str | None:
    return None if stopped_us is None else f"≈ {stopped_us / 1e6:.0f}"
