"""Texts for people: a run's tables and the sentences below them, for a terminal or a page.

The HTML page is self-contained: no script, no network, images embedded. jinja2's autoescape escapes
all outside text, above all names of runs and operators; a policy in the page forbids scripts and
foreign addresses, should anything get through.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import fields, replace

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from hydroslurm.report.external_sources import Accounting
from hydroslurm.report.figures import Figures, Report
from hydroslurm.report.history import LATENCIES, Kind
from hydroslurm.report.nsys import Profile, profile_heading, profile_sentences, profile_tables
from hydroslurm.report.pauses import Pause
from hydroslurm.report.stops import KILLED, Stop
from hydroslurm.report.tables import UNKNOWN, Column, Table, columns_of, number, table_of

MOST_ON_PAGE = 200
"""Rows of each table; figures.json has more."""
MOST_IN_TERMINAL = 40
_ROOMY_COLUMNS = 8
"""Tables with more columns need all 80 characters of a terminal."""
_NOT_HEARD = "No pause was seen, but signal handlers were lost: see below."


def report_view(report: Report, *, max_rows: int = MOST_IN_TERMINAL) -> RenderableType:
    """Show the tables of pauses and stops with their percentiles, how the time was spent, and what
    is missing; one sentence if there was neither."""
    history = report.history
    heading = Text(_heading(report), style="bold")
    below = [Text(sentence) for sentence in _sentences_below(report)]
    if not history.attempts:
        why = "No events yet: the job has not started, or pausing was never installed in it."
        return Group(heading, Text(why), *below)
    parts = [heading, *_about_pauses(report, max_rows)]
    if report.stopped:
        parts += _about_stops(report, max_rows)
    elif not history.pauses:
        heard = not any(attempt.lost_signals for attempt in history.attempts)
        parts.append(Text("Nothing was paused." if heard else _NOT_HEARD))
    tables = [_slurm_table(report.accounting), _goodput_table(report.figures)]
    parts += [in_terminal(table) for table in tables if table and table.rows]
    return Group(*parts, *below)


def profile_view(profile: Profile) -> RenderableType:
    """Show one nsys report: its tables, and the sentences below them."""
    return Group(
        Text(profile_heading(profile), style="bold"),
        *map(in_terminal, profile_tables(profile, most=MOST_IN_TERMINAL)),
        *map(Text, profile_sentences(profile)),
    )


def page(report: Report, *, pictures: Sequence[tuple[str, bytes]]) -> str:
    """Make the HTML page of a report.

    Args:
        pictures: pairs of a description, for those who cannot see it, and a PNG.
    """
    # a template per call: importers need not compile it
    environment = Environment(
        loader=PackageLoader("hydroslurm.report", package_path=""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    figures = report.figures
    tables = [
        _goodput_table(figures),
        _latency_table(figures, "pause", "nsys", "save", "stop", title="Latencies"),
        pauses_table(report, most=MOST_ON_PAGE, wide=True),
        stops_table(report, most=MOST_ON_PAGE, wide=True),
    ]
    return environment.get_template("page.html.j2").render(
        figures=figures,
        jobs=report.accounting.names(figures.job_ids),
        pictures=[(alt, base64.b64encode(png).decode()) for alt, png in pictures],
        tables=[table for table in tables if table and table.rows],
        sentences=_sentences_below(report),
    )


def stop_sentences(report: Report, *, most: int = 5) -> list[str]:
    """Say what was lost, and what is missing from the log."""
    figures = report.figures.stops
    least = "at least " if figures.at_least else ""
    sentences = [f"Steps lost: {least}{figures.steps_lost_total}."]
    stopped = report.stopped_in_time
    torn = [s for s in stopped if not s.stop.complete]
    for s in torn[:most]:
        which = f"Attempt {report.history.attempt_number(s.attempt)} of rank {s.stop.rank}"
        if s.stop.left == KILLED and s.stop.requested_mono_ns is None:
            sentences.append(f"{which} was killed without warning.")
        else:
            sentences.append(f"{which} wrote no {', '.join(s.stop.missing)}.")
    if len(torn) > most:
        sentences.append(f"{len(torn) - most} more stops are incomplete: see figures.json.")
    return sentences + [
        f"Not requeued by rank {s.stop.rank}: {s.stop.requeue_error}"
        for s in stopped
        if s.stop.requeue_error
    ]


def _about_pauses(report: Report, max_rows: int) -> list[RenderableType]:
    history, figures = report.history, report.figures
    if not history.pauses:
        return []
    table = pauses_table(report, most=max_rows)
    percentiles = [_latency_table(figures, "pause")]
    if figures.nsys is not None and figures.nsys.joined:
        percentiles.append(_latency_table(figures, "nsys", title="The same pauses by nsys"))
    sentences = map(Text, _together_sentences(report))
    return [*_cut(table, "pauses"), *map(in_terminal, percentiles), *sentences]


def _about_stops(report: Report, max_rows: int) -> list[RenderableType]:
    table = stops_table(report, most=max_rows)
    percentiles = in_terminal(_latency_table(report.figures, "stop"))
    return [*_cut(table, "stops"), percentiles, *map(Text, stop_sentences(report))]


def _cut(table: Table, what: str) -> list[RenderableType]:
    """Show a table without a title, as the first of its kind; percentiles follow."""
    parts = [in_terminal(replace(table, title="", left_out=0))]
    if table.left_out:
        note = f"{table.left_out} later {what} are left out; the figures below are of all."
        parts.append(Text(note))
    return parts


def _sentences_below(report: Report) -> Sequence[str]:
    history = report.history
    clocks = [history.alignment.message] if history.attempts else []
    return [*clocks, *report.missing]


def _together_sentences(report: Report) -> list[str]:
    """Say what a suspend could have interrupted."""
    sentences, in_flight = [], report.figures.in_flight
    if in_flight:
        sentences.append(
            f"{_counted(in_flight, 'pause')} with collectives in flight (! above): such a "
            "suspend has to be shorter than their timeout."
        )
    alone = sum(
        pause.all_parked_us is None and pause.parked_mono_ns is not None
        for attempt in report.history.attempts
        if attempt.world_size > 1
        for pause in attempt.pauses
    )
    if alone:
        sentences.append(f"{_counted(alone, 'pause')} ended before all ranks were parked.")
    return sentences


def _heading(report: Report) -> str:
    figures = report.figures
    jobs = report.accounting.names(figures.job_ids)
    parts = [
        f"run {figures.run}",
        f"job {jobs}" if jobs else "no Slurm job",
        _counted(figures.ranks, "rank"),
        f"observed {figures.observed_s:.1f} s",
    ]
    if figures.restarts:
        parts.append(_counted(figures.restarts, "requeue"))
    if figures.stops.count:
        parts.append(_counted(figures.stops.count, "stop"))
    return ", ".join(parts)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


# --- tables ---------------------------------------------------------------------------------------


def pauses_table(report: Report, *, most: int = MOST_IN_TERMINAL, wide: bool = False) -> Table:
    """Make the table of why, how fast, how long and where each pause held its rank."""
    rows, history = report.pauses_in_time, report.history
    shown = [row.joined for row in rows[:most]]
    columns = dict(columns_of(Pause))
    notes = []
    if history.several_attempts and rows:
        numbers = {
            id(pause): f"{history.attempt_number(row.attempt)}.{pause.number}"
            for row, pause in zip(rows, shown, strict=False)
        }
        columns["number"] = columns["number"]._replace(cell=lambda pause: numbers[id(pause)])
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
    left_out, note = len(rows) - len(shown), " ".join(notes)
    return table_of("Pauses", columns.values(), shown, left_out=left_out, note=note, wide=wide)


def stops_table(report: Report, *, most: int = MOST_IN_TERMINAL, wide: bool = False) -> Table:
    """Make the table of each stop's reason, its save and return times, and its losses."""
    rows, columns = report.stopped_in_time, dict(columns_of(Stop))
    numbers = {id(row.stop): str(report.history.attempt_number(row.attempt)) for row in rows[:most]}
    columns["attempt"] = columns["attempt"]._replace(cell=lambda stop: numbers[id(stop)])
    note = (
        "Up to left: from the request. Eligible: from the end of the attempt; start, by Slurm: "
        "from eligible; runs: from that start to the process's first event. Next began: from the "
        "last event to that one. Slurm's times are whole seconds."
    )
    return table_of(
        "Stops",
        columns.values(),
        [row.stop for row in rows[:most]],
        left_out=max(0, len(rows) - most),
        note=note if wide else "",
        wide=wide,
    )


def _latency_table(figures: Figures, *kinds: Kind, title: str = "") -> Table:
    """Make the table of percentiles for these kinds; with several, each row names its kind."""
    having = {"stop": figures.stops, "nsys": figures.nsys}
    rows = []
    for kind in kinds:
        for latency in LATENCIES[kind]:
            summary = getattr(having.get(kind, figures), latency.key, {"count": 0})
            if summary["count"]:
                values = (format(summary[name], latency.spec) for name in ("p50", "p99", "max"))
                prefix = f"{kind}: " if len(kinds) > 1 else ""
                label = f"{prefix}{latency.label} ({latency.unit})"
                rows.append((label, str(summary["count"]), *values))
    about = "latency" if title else f"over all {kinds[0]}s"
    headings = (about, "count", "p50", "p99", "max")
    return Table(title, headings, tuple(rows), left=(True, False, False, False, False))


def _goodput_table(figures: Figures) -> Table | None:
    """Make the table of how the time was spent; None for a run without events."""
    goodput = figures.goodput
    if goodput is None:
        return None
    allocated_s, wall_s = goodput.allocated_s, goodput.wall_s
    rows = [
        (heading, f"{part_s:,.1f}", _share(part_s, allocated_s), _share(part_s, wall_s))
        for part in fields(goodput)
        if (heading := part.metadata["heading"])
        and ((part_s := getattr(goodput, part.name)) > 0 or part.name == "productive_s")
    ]
    queued_s = goodput.queued_s
    # events alone do not show idle time: an elastic agent restarts ranks
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


def _slurm_table(accounting: Accounting) -> Table:
    """Make the table of the jobs' attempts in Slurm's accounting."""
    attempts = accounting.attempts
    columns = (
        Column("job", lambda a: accounting.names([a.job_id]), left=True),
        Column("ended", lambda a: a.state, left=True),
        Column("not eligible (s)", lambda a: _span(a.submit_epoch_s, a.eligible_epoch_s)),
        Column("queued (s)", lambda a: _span(a.eligible_epoch_s, a.start_epoch_s)),
        Column("ran (s)", lambda a: _span(a.start_epoch_s, a.end_epoch_s)),
        Column("suspended (s)", lambda attempt: number(attempt.suspended_s, ",d")),
    )
    requeues = sum(attempt.state == "REQUEUED" for attempt in attempts)
    return table_of(
        "Attempts in Slurm's accounting",
        columns,
        attempts[-MOST_IN_TERMINAL:],
        left_out=max(0, len(attempts) - MOST_IN_TERMINAL),
        note=f"Requeues: {requeues}. After a requeue the next attempt of the job follows.",
    )


def _share(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.1f} %" if whole_s > 0 else UNKNOWN


def _span(begin_s: int | None, end_s: int | None) -> str | None:
    return None if begin_s is None or end_s is None else f"{max(0, end_s - begin_s):,d}"


def in_terminal(table: Table) -> RenderableType:
    """Lay out a table for a terminal of 80 columns."""
    padding = (0, 1) if len(table.headings) <= _ROOMY_COLUMNS else 0
    shown = RichTable(
        header_style="bold", box=box.SIMPLE_HEAD, padding=padding, collapse_padding=True
    )
    shown.title, shown.title_justify = table.title or None, "left"
    for index, (heading, left) in enumerate(zip(table.headings, table.left, strict=True)):
        if index and not left and "\n" not in heading:
            heading = heading.replace(" ", "\n")  # numbers determine a column's width
        widest = max((len(row[index]) for row in table.rows), default=0)
        shown.add_column(
            heading,
            justify="left" if left else "right",
            overflow="fold",
            min_width=min(12, widest) if left else None,
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    parts: list[RenderableType] = [shown]
    if table.left_out:
        parts.append(Text(f"{table.left_out} more are left out: see figures.json."))
    if table.note:
        parts.append(Text(table.note, style="dim"))
    return Group(*parts)
