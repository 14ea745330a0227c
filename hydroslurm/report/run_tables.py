"""The tables of a whole run: latencies over all pauses, saves and stops; where the time went; what
Slurm says. Pure."""

from __future__ import annotations

from typing import Literal

from hydroslurm.report.external_sources import ExternalSources
from hydroslurm.report.figures import Figures
from hydroslurm.report.tables import UNKNOWN, Table

_MOST_ATTEMPTS = 40

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
