"""What a person reads: the tables of a run and the sentences below them, in a terminal or a page.

The HTML page needs nothing else: no script, no network, images embedded. jinja2's autoescape
escapes whatever came from outside, names of runs and operators above all; a policy in the page
itself forbids scripts and foreign addresses, should anything get through.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace

from jinja2 import Environment, PackageLoader, StrictUndefined
from rich.console import Group, RenderableType
from rich.text import Text

from hydroslurm.report.figures import Report
from hydroslurm.report.run_tables import (
    goodput_table,
    latency_table,
    pauses_table,
    slurm_table,
    stops_table,
)
from hydroslurm.report.stops import KILLED
from hydroslurm.report.tables import Table, in_terminal

MOST_ON_PAGE = 200
"""Rows of each table; figures.json has more."""
_NOT_HEARD = "No pause was seen, but signal handlers were lost: see below."


def report_view(report: Report, *, max_rows: int = 40) -> RenderableType:
    """The tables of pauses and of stops, each with its percentiles below, where the time went, and
    what is missing; one sentence when there was neither."""
    history = report.history
    heading = Text(_heading(report), style="bold")
    below = [Text(sentence) for sentence in _sentences_below(report)]
    if not history.attempts:
        why = "No events yet: the job has not started, or pausing was never installed in it."
        return Group(heading, Text(why), *below)
    parts = [heading, *_about_pauses(report, max_rows)]
    if report.stops:
        parts += _about_stops(report, max_rows)
    elif not history.pauses:
        heard = not any(attempt.lost_signals for attempt in history.attempts)
        parts.append(Text("Nothing was paused." if heard else _NOT_HEARD))
    tables = [slurm_table(report.sources), goodput_table(report.figures)]
    parts += [in_terminal(table) for table in tables if table is not None and table.rows]
    return Group(*parts, *below)


def page(report: Report, *, pictures: Sequence[tuple[str, bytes]]) -> str:
    """The report as one HTML page.

    Args:
        pictures: for each a description for those who cannot see it, and its PNG.
    """
    # a template per call: nothing is compiled by those who import this
    environment = Environment(
        loader=PackageLoader("hydroslurm.report", package_path=""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    history, sources, figures = report.history, report.sources, report.figures
    tables = [
        goodput_table(figures),
        latency_table(figures, "pause", "nsys", "save", "stop", title="Latencies"),
        pauses_table(history, report.pauses_in_time, most=MOST_ON_PAGE, wide=True),
        stops_table(history, report.stops_in_time, most=MOST_ON_PAGE, wide=True),
        slurm_table(sources),
    ]
    return environment.get_template("page.html.j2").render(
        figures=figures,
        jobs=sources.accounting.names(figures.job_ids),
        pictures=[(alt, base64.b64encode(png).decode()) for alt, png in pictures],
        tables=[table for table in tables if table is not None and table.rows],
        sentences=_sentences_below(report),
    )


def stop_sentences(report: Report, *, most: int = 5) -> list[str]:
    """What was lost, and what is missing from the log."""
    history, stops, figures = report.history, report.stops_in_time, report.figures.stops
    least = "at least " if figures.at_least else ""
    said = [f"Steps lost: {least}{figures.steps_lost_total}."]
    torn = [one for one in stops if not one.complete]
    for one in torn[:most]:
        which = f"Attempt {history.attempt_number(one.stopped)} of rank {one.rank}"
        if one.left == KILLED and one.requested_mono_ns is None:
            said.append(f"{which} was killed without warning.")
        else:
            said.append(f"{which} wrote no {', '.join(one.missing)}.")
    if len(torn) > most:
        said.append(f"{len(torn) - most} more stops are incomplete: see figures.json.")
    for one in stops:
        if one.requeue_error:
            said.append(f"Not requeued by rank {one.rank}: {one.requeue_error}")
    return said


def _about_pauses(report: Report, max_rows: int) -> list[RenderableType]:
    history, figures = report.history, report.figures
    if not history.pauses:
        return []
    table = pauses_table(history, report.pauses_in_time, most=max_rows)
    percentiles = [latency_table(figures, "pause")]
    if figures.nsys is not None and figures.nsys.joined:
        percentiles.append(latency_table(figures, "nsys", title="The same pauses by nsys"))
    sentences = map(Text, _together_sentences(report))
    return [*_cut(table, "pauses"), *map(in_terminal, percentiles), *sentences]


def _about_stops(report: Report, max_rows: int) -> list[RenderableType]:
    table = stops_table(report.history, report.stops_in_time, most=max_rows)
    percentiles = in_terminal(latency_table(report.figures, "stop"))
    return [*_cut(table, "stops"), percentiles, *map(Text, stop_sentences(report))]


def _cut(table: Table, what: str) -> list[RenderableType]:
    """The first table of its kind needs no title; below it stand the percentiles."""
    parts = [in_terminal(replace(table, title="", left_out=0))]
    if table.left_out:
        said = f"{table.left_out} later {what} are left out; the figures below are of all."
        parts.append(Text(said))
    return parts


def _sentences_below(report: Report) -> Sequence[str]:
    history = report.history
    clocks = history.alignment.sentences() if history.attempts else []
    return [*clocks, *report.sources.sentences(history)]


def _together_sentences(report: Report) -> list[str]:
    """What a suspend could have interrupted."""
    said, in_flight = [], report.figures.in_flight
    if in_flight:
        said.append(
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
        said.append(f"{_counted(alone, 'pause')} ended before all ranks were parked.")
    return said


def _heading(report: Report) -> str:
    figures = report.figures
    jobs = report.sources.accounting.names(figures.job_ids)
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
