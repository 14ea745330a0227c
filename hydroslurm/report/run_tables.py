"""The tables of a run: pauses and stops, as rows and link by link; totals; Slurm's view. Pure.

``wide`` tables, for the page, have columns for which a terminal has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.external_sources import ExternalSources
from hydroslurm.report.figures import Figures
from hydroslurm.report.history import History
from hydroslurm.report.lines import span
from hydroslurm.report.pauses import PEERS, Pause
from hydroslurm.report.rows import PauseRow, StopRow
from hydroslurm.report.stops import KILLED, Stop
from hydroslurm.report.tables import UNKNOWN, Column, Table, number, table_of

_MOST_ATTEMPTS = 40

# --- pauses -------------------------------------------------------------------------------------


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
        Column("SIGSTOP (s)", lambda row: _about_s(row.stopped_us), optional=True),
        Column("resume (s)", _resume, optional=True),
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


def _opened(row: PauseRow) -> str | None:
    pause = row.pause
    return _between(pause.resume_requested_mono_ns, pause.resumed_mono_ns, ",.0f", 1e3)


def _between(begin_ns: int | None, end_ns: int | None, spec: str, unit_ns: float) -> str | None:
    return number(span(begin_ns, end_ns, unit_ns), spec)


def _about_s(stopped_us: float | None) -> str | None:
    return None if stopped_us is None else f"≈ {stopped_us / 1e6:.0f}"


# --- stops --------------------------------------------------------------------------------------


def stops_table(
    history: History, rows: Sequence[StopRow], *, most: int = 40, wide: bool = False
) -> Table:
    """Why each attempt was stopped, how fast it was saved, and what was lost."""
    columns: list[Column[StopRow]] = [
        Column("at\n(s)", lambda row: f"{row.at_s:.1f}" if row.at_s < 1e4 else f"{row.at_s:.0f}"),
        Column("rank", lambda row: str(row.stop.rank)),
        Column("attempt", lambda row: str(history.attempt_number(row.stopped.attempt))),
        Column("stopped by", lambda row: _why(row.stop), left=True),
        Column("signal", lambda row: row.stop.signal, optional=True, left=True, wide=True),
        Column("safe\npoint\n(ms)", lambda row: number(row.stop.safe_point_ms, ",.0f")),
        Column("saved\n(ms)", lambda row: _saved(row.stop)),
        Column("re-\nqueued\n(ms)", lambda row: number(row.stop.requeued_ms, ",.0f")),
        Column("next\nbegan\n(s)", lambda row: number(row.stop.waited_s, ".1f")),
        Column("first\nstep\n(s)", lambda row: number(row.stop.first_step_s, ".1f")),
        Column("at\nstep", lambda row: _step(row.stop)),
        Column("steps\nlost", lambda row: lost(row.stop)),
        Column(
            "state (MB)",
            lambda row: number(row.stop.state_bytes, ",.1f", 1e6),
            optional=True,
            wide=True,
        ),
        Column(
            "not in the log",
            lambda row: ", ".join(row.stop.missing) or None,
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
        Column(
            "safe point (ms)", lambda row: number(row.stop.safe_point_ms, ",.0f"), optional=True
        ),
        Column("written (ms)", lambda row: number(row.stop.written_ms, ",.0f"), optional=True),
        Column("commit (ms)", lambda row: number(row.stop.durable_ms, ",.0f")),
        Column("requeue (ms)", lambda row: number(row.stop.requeued_ms, ",.0f"), optional=True),
        Column("left (ms)", lambda row: number(row.left_s, ",.0f", 1e-3), optional=True),
        Column("eligible (s)", lambda row: number(row.eligible_s, ".0f"), optional=True),
        Column("start (s)", lambda row: number(row.queued_s, ".0f"), optional=True),
        Column("runs (s)", lambda row: number(row.start_s, ".1f"), optional=True),
        Column("first step (s)", lambda row: number(row.stop.first_step_s, ".1f"), optional=True),
        Column("steps lost", lambda row: lost(row.stop), optional=True),
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
        Column("commit (ms)", lambda row: number(row.stop.durable_ms, ",.1f")),
        Column("commit, nsys (ms)", lambda row: number(row.nsys_committed_ms, ",.1f")),
        Column("requeue (ms)", lambda row: number(row.stop.requeued_ms, ",.1f"), optional=True),
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
        lambda row: f"r{row.stop.rank} {history.attempt_number(row.stopped.attempt)}",
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


def _saved(stop: Stop) -> str | None:
    if stop.durable_ms is None and stop.fast_ms is not None:
        return f"{stop.fast_ms:,.0f} fast"
    return number(stop.durable_ms, ",.0f")


def _step(stop: Stop) -> str | None:
    if stop.step is None:
        return None
    return f"{'≥ ' if stop.step_from == 'last_event' else ''}{stop.step:,}"


# --- the whole run ------------------------------------------------------------------------------

Kind = Literal["pause", "save", "stop"]
_LATENCIES: tuple[tuple[Kind, str, str, str], ...] = (
    ("pause", "signal → parked (µs)", "park_us", ",.0f"),
    ("pause", "signal → all ranks parked (µs)", "all_parked_us", ",.0f"),
    ("pause", "parked → devices idle (µs)", "drain_us", ",.0f"),
    ("pause", "parked (s)", "parked_s", ",.3f"),
    ("pause", "resume → running (µs)", "resume_us", ",.0f"),
    ("save", "start → committed (ms)", "save_ms", ",.1f"),
    ("stop", "signal → safe point (ms)", "safe_point_ms", ",.1f"),
    ("stop", "signal → files written (ms)", "written_ms", ",.1f"),
    ("stop", "signal → committed (ms)", "durable_ms", ",.1f"),
    ("stop", "signal → requeued (ms)", "requeued_ms", ",.1f"),
    ("stop", "queued (s)", "queued_s", ",.0f"),
    ("stop", "end → next attempt (s)", "waited_s", ",.2f"),
    ("stop", "next attempt → first step (s)", "first_step_s", ",.2f"),
)


def latency_table(figures: Figures, *kinds: Kind, title: str = "") -> Table:
    """Percentiles of what was measured of these kinds; of several, each row names its own."""
    rows = []
    for kind, label, key, spec in _LATENCIES:
        summary = getattr(figures.stops if kind == "stop" else figures, key)
        if kind in kinds and summary["count"]:
            values = (format(summary[name], spec) for name in ("p50", "p99", "max"))
            name = f"{kind}: {label}" if len(kinds) > 1 else label
            rows.append((name, str(summary["count"]), *values))
    about = "latency" if len(kinds) > 1 else f"over all {kinds[0]}s"
    headings = (about, "count", "p50", "p99", "max")
    return Table(title, headings, tuple(rows), left=(True, False, False, False, False))


def goodput_table(figures: Figures) -> Table | None:
    """Where the time went; None for a run without events."""
    goodput = figures.goodput
    if goodput is None:
        return None
    allocated_s, wall_s = goodput.allocated_s, goodput.wall_s
    parts = (
        ("steps that counted", goodput.productive_s),
        ("steps repeated", goodput.made_again_s),
        ("waiting for saves", goodput.saving_s),
        ("parked", goodput.parked_s),
        ("starting up", goodput.starting_s),
        ("saving and leaving", goodput.leaving_s),
        ("unknown", goodput.unknown_s),
    )
    rows = [
        (name, f"{part_s:,.1f}", _share(part_s, allocated_s), _share(part_s, wall_s))
        for name, part_s in parts
        if part_s > 0 or name == parts[0][0]
    ]
    queued_s = goodput.queued_s
    rows += [
        ("allocated", f"{allocated_s:,.1f}", "100.0 %", _share(allocated_s, wall_s)),
        ("waiting in the queue", f"{queued_s:,.1f}", "", _share(queued_s, wall_s)),
        ("wall clock", f"{wall_s:,.1f}", "", "100.0 %"),
    ]
    source = {"slurm": "Slurm", "events": "the events alone", "both": "Slurm and the events"}
    note = f"Of the first rank. Allocated time according to {source[goodput.allocated_from]}."
    if goodput.of_allocated is None:
        note += " No goodput: the program did not count steps."
    elif goodput.at_most:
        note += " At most: a killed attempt may have lost more steps than its log shows."
    headings = ("goodput", "seconds", "of allocated", "of wall clock")
    return Table(
        "Where the time went", headings, tuple(rows), (True, False, False, False), note=note
    )


def slurm_table(sources: ExternalSources) -> Table | None:
    """The attempts of the run's jobs in Slurm's accounting; None without any."""
    attempts = sources.accounting.attempts
    if not attempts:
        return None
    rows = [
        (
            f"{one.job_id}",
            one.state,
            _span(one.submit_epoch_s, one.eligible_epoch_s),
            _span(one.eligible_epoch_s, one.start_epoch_s),
            _span(one.start_epoch_s, one.end_epoch_s),
            UNKNOWN if one.suspended_s is None else f"{one.suspended_s:,d}",
        )
        for one in attempts[-_MOST_ATTEMPTS:]
    ]
    requeues = sum(one.state == "REQUEUED" for one in attempts)
    return Table(
        "Attempts in Slurm's accounting",
        ("job", "ended", "not eligible (s)", "queued (s)", "ran (s)", "suspended (s)"),
        tuple(rows),
        left=(True, True, False, False, False, False),
        left_out=max(0, len(attempts) - _MOST_ATTEMPTS),
        note=f"Requeues: {requeues}. After a requeue the next attempt of the job follows.",
    )


def _share(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.1f} %" if whole_s > 0 else UNKNOWN


def _span(begin_s: int | None, end_s: int | None) -> str:
    return UNKNOWN if begin_s is None or end_s is None else f"{max(0, end_s - begin_s):,d}"
