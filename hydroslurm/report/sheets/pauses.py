"""Sheets of pauses: why and where, link by link, and beside what nsys saw. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydroslurm.report.history import History
from hydroslurm.report.pauses import PEERS, Life, Pause
from hydroslurm.report.rows import PauseRow
from hydroslurm.report.sheets.core import UNKNOWN, Column, Sheet, form, sheet_of


def pauses_sheet(history: History, rows: Sequence[PauseRow], *, most: int) -> Sheet:
    """Why, for how long, and where each pause held its rank."""
    columns: list[Column[PauseRow]] = [
        Column("pause", lambda row: pause_name(history, row), always=True),
        Column("held at", lambda row: held_at(row.pause), always=True),
        Column("cause", lambda row: causes(row.pause), always=True),
        Column("signal", lambda row: row.pause.signal),
        Column("step", lambda row: form(row.pause.step, 1, ",d")),
        Column("at (s)", lambda row: form(row.at_s, 1, ",.2f"), always=True),
        Column("parked (s)", lambda row: form(row.pause.parked_s, 1, ",.3f"), always=True),
        Column("in flight", lambda row: form(row.pause.in_flight or None, 1, "d")),
    ]
    return sheet_of("Pauses", columns, rows, most=most, words=4)


def pause_chains(history: History, rows: Sequence[PauseRow], *, most: int) -> Sheet:
    """Each pause from the request to the first operator."""
    columns: list[Column[PauseRow]] = [
        Column("pause", lambda row: pause_name(history, row), always=True),
        Column("asked (ms)", lambda row: form(row.asked_us, 1e3, ".2f")),
        Column("closed (µs)", lambda row: _since(row.pause, row.pause.closed_mono_ns)),
        Column("held (µs)", lambda row: _since(row.pause, row.pause.held_mono_ns)),
        Column("parked (µs)", lambda row: form(row.pause.park_us, 1, ",.0f"), always=True),
        Column("all parked (ms)", lambda row: form(row.pause.all_parked_us, 1e3, ",.1f")),
        Column("drained (µs)", lambda row: form(row.pause.drain_us, 1, ",.0f")),
        Column("SIGSTOP (s)", lambda row: _about(row.stopped_us)),
        Column("resume (s)", lambda row: _resume(row.pause)),
        Column("opened (µs)", _opened),
        Column("runs (µs)", lambda row: form(row.pause.resume_us, 1, ",.0f"), always=True),
    ]
    note = (
        "Each from the request, which is the moment in the signal's handler; drained: from parked; "
        "opened and runs (the first operator): from the resume request."
    )
    if any(row.stopped_us is not None for row in rows):
        note += " SIGSTOP ≈: by the suspend grace of this site; no process sees that moment."
    if any(row.asked_us is not None for row in rows):
        note += " asked: from the request of the rank that was signalled, until this one was told."
    return sheet_of("Pauses, link by link", columns, rows, most=most, note=note)


def profiled_pauses(history: History, rows: Sequence[PauseRow], *, most: int) -> Sheet:
    """The log's latencies beside those of nsys."""
    seen = [row for row in rows if row.profiled is not None]

    def nsys(name: str) -> Callable[[PauseRow], str | None]:
        return lambda row: form(getattr(row.profiled, name), 1, ",.0f")

    columns: list[Column[PauseRow]] = [
        Column("pause", lambda row: pause_name(history, row), always=True),
        Column("parked (µs)", lambda row: form(row.pause.park_us, 1, ",.0f"), always=True),
        Column("parked, nsys (µs)", nsys("park_us"), always=True),
        Column("last kernel (µs)", nsys("last_kernel_us")),
        Column("drained, nsys (µs)", nsys("drain_us")),
        Column("runs (µs)", lambda row: form(row.pause.resume_us, 1, ",.0f"), always=True),
        Column("runs, nsys (µs)", nsys("resume_us"), always=True),
        Column("first kernel (µs)", nsys("first_kernel_us")),
        Column("largest difference (µs)", nsys("difference_us"), always=True),
        Column("nsys clock ± (µs)", nsys("error_us"), always=True),
    ]
    return sheet_of("Pauses by the log and by nsys", columns, seen, most=most)


def pause_name(history: History, row: PauseRow) -> str:
    """Rank, and number in its life; with the life where there are several."""
    return f"r{row.life.rank} {pause_number(history, row.life, row.pause)}"


def pause_number(history: History, life: Life, pause: Pause) -> str:
    own = str(pause.number)
    return f"{history.life_number(life)}.{own}" if history.several_lives else own


def causes(pause: Pause) -> str:
    """Its own; that the peers' cause joined them goes without saying."""
    own = [cause for cause in pause.causes if cause != PEERS]
    return "+".join(own or pause.causes) or UNKNOWN


def held_at(pause: Pause) -> str:
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


def _since(pause: Pause, stamp_ns: int | None) -> str | None:
    begin_ns = pause.requested_mono_ns
    if begin_ns is None or stamp_ns is None or stamp_ns < begin_ns:
        return None
    return f"{(stamp_ns - begin_ns) / 1e3:,.0f}"


def _resume(pause: Pause) -> str | None:
    begin_ns, end_ns = pause.requested_mono_ns, pause.resume_requested_mono_ns
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return f"{(end_ns - begin_ns) / 1e9:,.3f}"


def _opened(row: PauseRow) -> str | None:
    begin_ns, end_ns = row.pause.resume_requested_mono_ns, row.pause.resumed_mono_ns
    if begin_ns is None or end_ns is None or end_ns < begin_ns:
        return None
    return f"{(end_ns - begin_ns) / 1e3:,.0f}"


def _about(stopped_us: float | None) -> str | None:
    return None if stopped_us is None else f"≈ {stopped_us / 1e6:.0f}"
