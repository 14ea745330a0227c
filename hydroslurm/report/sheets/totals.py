"""Sheets of the whole run: latencies, where the time went, and the lives by Slurm. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydroslurm.report.beside import Beside
from hydroslurm.report.sheets.core import UNKNOWN, Sheet

_MOST_LIVES = 40


def summary_sheet(figures: Mapping[str, Any]) -> Sheet:
    """Percentiles of everything that was measured."""
    stops = figures["stops"]
    known = (
        ("signal → parked (µs)", figures["park_us"], ",.0f"),
        ("signal → all ranks parked (µs)", figures["all_parked_us"], ",.0f"),
        ("parked → devices idle (µs)", figures["drain_us"], ",.0f"),
        ("resume → running (µs)", figures["resume_us"], ",.0f"),
        ("parked (s)", figures["parked_s"], ",.3f"),
        ("save: start → committed (ms)", figures["save_ms"], ",.1f"),
        ("stop: signal → safe point (ms)", stops["safe_point_ms"], ",.1f"),
        ("stop: signal → state copied (ms)", stops["staged_ms"], ",.1f"),
        ("stop: signal → files written (ms)", stops["written_ms"], ",.1f"),
        ("stop: signal → committed (ms)", stops["durable_ms"], ",.1f"),
        ("stop: signal → requeued (ms)", stops["requeued_ms"], ",.1f"),
        ("stop: queued (s)", stops["queued_s"], ",.0f"),
        ("stop: end → next life (s)", stops["waited_s"], ",.2f"),
        ("stop: next life → first step (s)", stops["first_step_s"], ",.2f"),
    )
    rows = [
        (name, str(one["count"]), *(format(one[key], form) for key in ("p50", "p99", "max")))
        for name, one, form in known
        if one["count"]
    ]
    headings = ("latency", "number", "median", "p99", "largest")
    return Sheet("Latencies", headings, tuple(rows))


def goodput_sheet(figures: Mapping[str, Any]) -> Sheet | None:
    """Where the time went; None for a run without events."""
    goodput = figures["goodput"]
    if goodput is None:
        return None
    allocated_s, wall_s = goodput["allocated_s"], goodput["wall_s"]
    names = (
        ("steps that counted", "productive_s"),
        ("steps made again", "made_again_s"),
        ("waiting for saves", "saving_s"),
        ("parked", "parked_s"),
        ("starting up", "starting_s"),
        ("saving and leaving", "leaving_s"),
        ("unknown", "unknown_s"),
    )
    rows = [
        (
            name,
            f"{goodput[key]:,.1f}",
            _share(goodput[key], allocated_s),
            _share(goodput[key], wall_s),
        )
        for name, key in names
        if goodput[key] > 0 or key == "productive_s"
    ]
    rows.append(("allocated", f"{allocated_s:,.1f}", "100.0 %", _share(allocated_s, wall_s)))
    rows.append(
        (
            "waiting in the queue",
            f"{goodput['queued_s']:,.1f}",
            "",
            _share(goodput["queued_s"], wall_s),
        )
    )
    rows.append(("wall clock", f"{wall_s:,.1f}", "", "100.0 %"))
    source = {"slurm": "Slurm", "events": "the events alone", "both": "Slurm and the events"}
    note = f"Of the first rank. Allocated time by {source[goodput['allocated_from']]}."
    if goodput["of_allocated"] is None:
        note += " No goodput: nobody told the steps."
    elif goodput["at_most"]:
        note += " At most: a killed life may have lost more steps than its log tells."
    headings = ("goodput", "seconds", "of allocated", "of wall clock")
    return Sheet("Where the time went", headings, tuple(rows), note=note)


def slurm_sheet(beside: Beside) -> Sheet | None:
    """The lives of the run's jobs as Slurm has them."""
    lives = beside.accounting.lives
    if not lives:
        return None
    rows = [
        (
            f"{life.job_id}",
            life.state,
            _span(life.submit_epoch_s, life.eligible_epoch_s),
            _span(life.eligible_epoch_s, life.start_epoch_s),
            _span(life.start_epoch_s, life.end_epoch_s),
            UNKNOWN if life.suspended_s is None else f"{life.suspended_s:,d}",
        )
        for life in lives[-_MOST_LIVES:]
    ]
    headings = ("job", "ended", "not eligible (s)", "queued (s)", "ran (s)", "suspended (s)")
    left_out = max(0, len(lives) - _MOST_LIVES)
    requeues = sum(life.state == "REQUEUED" for life in lives)
    note = f"Requeues: {requeues}. A life that was requeued is followed by the next one of its job."
    return Sheet("Lives by Slurm", headings, tuple(rows), words=2, left_out=left_out, note=note)


def _share(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.1f} %" if whole_s > 0 else UNKNOWN


def _span(begin_s: int | None, end_s: int | None) -> str:
    return UNKNOWN if begin_s is None or end_s is None else f"{max(0, end_s - begin_s):,d}"
