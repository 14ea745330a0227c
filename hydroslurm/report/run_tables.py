"""The tables of a run: its pauses, its stops, all latencies, where the time went, and what Slurm
says. Pure.

The terminal has no room for ``wide`` columns; the page shows them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hydroslurm.report.external_sources import ExternalSources
from hydroslurm.report.figures import Figures
from hydroslurm.report.history import LATENCIES, History, Kind
from hydroslurm.report.lines import span
from hydroslurm.report.pauses import PEERS, Pause
from hydroslurm.report.rows import PauseRow, StopRow
from hydroslurm.report.stops import KILLED, Stop
from hydroslurm.report.tables import UNKNOWN, Column, Table, number, table_of

_MOST_ATTEMPTS = 40


def pauses_table(
    history: History, rows: Sequence[PauseRow], *, most: int = 40, wide: bool = False
) -> Table:
    """Why, how fast and for how long each pause held its rank, and where."""

    def pause(name: str, spec: str, unit: float = 1) -> Callable[[PauseRow], str | None]:
        return lambda row: number(getattr(row.pause, name), spec, unit)

    def nsys(name: str) -> Callable[[PauseRow], str | None]:
        return lambda row: number(getattr(row.profiled, name, None), ",.0f")

    def since_request(name: str, spec: str, unit_ns: float) -> Callable[[PauseRow], str | None]:
        return lambda row: number(
            span(row.pause.requested_mono_ns, getattr(row.pause, name), unit_ns), spec
        )

    more: dict[str, Any] = {"optional": True, "wide": True}
    columns: list[Column[PauseRow]] = [
        Column("at\n(s)", lambda row: number(row.at_s, ",.2f" if wide else ".2f")),
        Column("rank", lambda row: str(row.attempt.rank)),
        Column("pause", lambda row: _pause_number(history, row)),
        Column("cause", lambda row: _causes(row.pause), left=True),
        Column("signal", lambda row: row.pause.signal, left=True, **more),
        Column("step", pause("step", ",d"), **more),
        Column("asked (ms)", lambda row: number(row.asked_us, ".2f", 1e3), **more),
        Column("closed (µs)", since_request("closed_mono_ns", ",.0f", 1e3), **more),
        Column("held (µs)", since_request("held_mono_ns", ",.0f", 1e3), **more),
        Column("signal →\nparked\n(µs)", pause("park_us", ",.0f")),
        Column("all\nparked\n(ms)", lambda row: _all_parked(row.pause), optional=True),
        Column("drained (µs)", pause("drain_us", ",.0f"), **more),
        Column("vacated\n(GB)", _vacated_gb, optional=True),
        Column("vacate\n(s)", pause("vacate_s", ",.2f"), optional=True),
        Column("SIGSTOP (s)", lambda row: _about_s(row.stopped_us), **more),
        Column("parked\n(s)", pause("parked_s", ",.3f")),
        Column("resume (s)", since_request("resume_requested_mono_ns", ",.3f", 1e9), **more),
        Column("restore\n(s)", pause("restore_s", ",.2f"), optional=True),
        Column("opened (µs)", _opened, **more),
        Column("resume →\nrunning\n(µs)", pause("resume_us", ",.0f")),
        Column("held at", lambda row: _held_at(row.pause), left=True),
        Column("parked, nsys (µs)", nsys("park_us"), **more),
        Column("last kernel (µs)", nsys("last_kernel_us"), **more),
        Column("drained, nsys (µs)", nsys("drain_us"), **more),
        Column("runs, nsys (µs)", nsys("resume_us"), **more),
        Column("first kernel (µs)", nsys("first_kernel_us"), **more),
        Column("largest difference (µs)", nsys("difference_us"), **more),
        Column("nsys clock ± (µs)", nsys("error_us"), **more),
    ]
    notes = []
    if history.several_attempts and rows:
        notes.append("Pause 2.1 is the first pause of the second attempt, after a requeue.")
    if wide:
        notes.append(
            "All times are from the request, the moment in the signal handler, except: drained, "
            "from parked; opened, running and first kernel, from the resume request."
        )
        if any(row.stopped_us is not None for row in rows):
            notes.append("SIGSTOP ≈: by this site's suspend grace; no process sees that moment.")
        if any(row.asked_us is not None for row in rows):
            notes.append("asked: from the signalled rank's request until this rank was told.")
    return table_of("Pauses", columns, rows, most=most, wide=wide, note=" ".join(notes))


def stops_table(
    history: History, rows: Sequence[StopRow], *, most: int = 40, wide: bool = False
) -> Table:
    """Why each attempt was stopped, how fast it was saved and came back, and what was lost."""

    def stop(name: str, spec: str, unit: float = 1) -> Callable[[StopRow], str | None]:
        return lambda row: number(getattr(row, name), spec, unit)

    more: dict[str, Any] = {"optional": True, "wide": True}
    columns: list[Column[StopRow]] = [
        Column("at\n(s)", lambda row: f"{row.at_s:.1f}" if row.at_s < 1e4 else f"{row.at_s:.0f}"),
        Column("rank", lambda row: str(row.rank)),
        Column("attempt", lambda row: str(history.attempt_number(row.stopped))),
        Column("stopped by", _why, left=True),
        Column("signal", lambda row: row.signal, left=True, **more),
        Column("safe\npoint\n(ms)", stop("safe_point_ms", ",.0f")),
        Column("saving, nsys (ms)", stop("nsys_saving_ms", ",.1f"), **more),
        Column("written (ms)", stop("written_ms", ",.0f"), **more),
        Column("saved\n(ms)", stop("durable_ms", ",.0f")),
        Column("saved, nsys (ms)", stop("nsys_committed_ms", ",.1f"), **more),
        Column("re-\nqueued\n(ms)", stop("requeued_ms", ",.0f")),
        Column("requeued, nsys (ms)", stop("nsys_requeued_ms", ",.1f"), **more),
        Column("left (ms)", stop("left_s", ",.0f", 1e-3), **more),
        Column("eligible (s)", stop("eligible_s", ".0f"), **more),
        Column("start (s)", stop("queued_s", ".0f"), **more),
        Column("runs (s)", stop("start_s", ".1f"), **more),
        Column("next\nbegan\n(s)", stop("waited_s", ".1f")),
        Column("first\nstep\n(s)", stop("first_step_s", ".1f")),
        Column("at\nstep", _step),
        Column("steps\nlost", _lost),
        Column("samples lost", stop("samples_lost", ",d"), **more),
        Column("state (MB)", stop("state_bytes", ",.1f", 1e6), **more),
        Column("not in the log", lambda row: ", ".join(row.missing) or None, left=True, **more),
    ]
    note = (
        "Up to left: from the request. Eligible: from the end of the attempt; start, by Slurm: "
        "from eligible; runs: from that start to the process's first event. Next began: from the "
        "last event to that one. Slurm's times are whole seconds."
    )
    return table_of("Stops", columns, rows, most=most, wide=wide, note=note if wide else "")


def latency_table(figures: Figures, *kinds: Kind, title: str = "") -> Table:
    """Percentiles of what was measured of these kinds; of several, each row names its own."""
    having = {"stop": figures.stops, "nsys": figures.nsys}
    rows = []
    for latency in LATENCIES:
        summary = getattr(having.get(latency.kind, figures), latency.key, {"count": 0})
        if latency.kind in kinds and summary["count"]:
            values = (format(summary[name], latency.spec) for name in ("p50", "p99", "max"))
            name = f"{latency.label} ({latency.unit})"
            name = f"{latency.kind}: {name}" if len(kinds) > 1 else name
            rows.append((name, str(summary["count"]), *values))
    about = "latency" if len(kinds) > 1 or title else f"over all {kinds[0]}s"
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
    # the events alone do not say whether anybody waited: below an elastic agent ranks start anew
    between = "between attempts" if goodput.allocated_from == "events" else "waiting in the queue"
    rows += [
        ("allocated", f"{allocated_s:,.1f}", "100.0 %", _share(allocated_s, wall_s)),
        (between, f"{queued_s:,.1f}", "", _share(queued_s, wall_s)),
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
            sources.accounting.names([one.job_id]),
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


def _pause_number(history: History, row: PauseRow) -> str:
    """With its attempt where there are several."""
    own = str(row.pause.number)
    return f"{history.attempt_number(row.attempt)}.{own}" if history.several_attempts else own


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


def _vacated_gb(row: PauseRow) -> str | None:
    """Of device memory; a dash where the pause was to vacate and did not."""
    moved_bytes = row.pause.vacated_bytes
    if moved_bytes is None:
        return UNKNOWN if row.pause.not_vacated else None
    return f"{moved_bytes / 1e9:,.2f}"


def _opened(row: PauseRow) -> str | None:
    pause = row.pause
    return number(span(pause.resume_requested_mono_ns, pause.resumed_mono_ns, 1e3), ",.0f")


def _about_s(stopped_us: float | None) -> str | None:
    return None if stopped_us is None else f"≈ {stopped_us / 1e6:.0f}"


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


def _lost(stop: Stop) -> str:
    """Steps lost; a lower bound is shown as one."""
    if stop.steps_lost is None:
        return UNKNOWN
    return f"{'' if stop.steps_lost_exactly else '≥ '}{stop.steps_lost:,}"
