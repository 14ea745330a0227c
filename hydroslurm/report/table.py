"""What a person reads in the terminal: the tables of a run, and the sentences below them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hydroslurm.report.beside import Beside
from hydroslurm.report.figures import figures_of
from hydroslurm.report.history import History
from hydroslurm.report.pauses_table import pauses_table, summary_table
from hydroslurm.report.rows import Rows
from hydroslurm.report.sheets.core import Sheet
from hydroslurm.report.sheets.pauses import pause_chains, profiled_pauses
from hydroslurm.report.sheets.stops import profiled_stops, stop_chains
from hydroslurm.report.sheets.totals import goodput_sheet, slurm_sheet
from hydroslurm.report.stops_table import stop_sentences, stops_summary, stops_table

_MOST_CHAINS = 20
_NOT_HEARD = "No pause was seen, but the handlers of signals were lost: see below."


def report_view(
    history: History,
    beside: Beside | None = None,
    figures: Mapping[str, Any] | None = None,
    rows: Rows | None = None,
    *,
    max_rows: int = 40,
) -> RenderableType:
    """The tables of pauses and of stops, each with its percentiles below, then link by link, where
    the time went, and what is missing; one sentence when there was neither.

    Args:
        figures, rows: of the same, where they are made already.
    """
    beside = beside or Beside()
    rows = rows or Rows.of(history, beside)
    figures = figures or figures_of(history, beside, rows)
    heading = Text(_heading(figures), style="bold")
    said = [Text(sentence) for sentence in _last_words(history, beside)]
    if not history.lives:
        why = "No events yet: the job has not started, or pausing was never installed in it."
        return Group(heading, Text(why), *said)
    parts: list[RenderableType] = [heading, *_about_pauses(history, figures, max_rows)]
    if history.stopped:
        parts += _about_stops(history, figures, max_rows)
    elif not history.pauses:
        heard = not any(life.lost_signals for life in history.lives)
        parts.append(Text("Nothing was paused." if heard else _NOT_HEARD))
    parts += _chains(history, beside, figures, rows, most=min(max_rows, _MOST_CHAINS))
    return Group(*parts, *said)


def sheet_table(sheet: Sheet) -> RenderableType:
    """A sheet for a terminal of 80 columns."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, title=sheet.title)
    table.title_justify = "left"
    for index, heading in enumerate(sheet.headings):
        justify: Any = "left" if index < sheet.words else "right"
        table.add_column(_broken(heading) if index else heading, justify=justify)
    for row in sheet.rows:
        table.add_row(*(Text(cell) for cell in row))
    parts: list[RenderableType] = [table]
    if sheet.left_out:
        parts.append(Text(f"{sheet.left_out} more are left out: see figures.json."))
    if sheet.note:
        parts.append(Text(sheet.note, style="dim"))
    return Group(*parts)


def _chains(
    history: History, beside: Beside, figures: Mapping[str, Any], rows: Rows, *, most: int
) -> list[RenderableType]:
    pauses, stops = rows.pauses_in_time, rows.stops_in_time
    sheets: list[Sheet | None] = [
        pause_chains(history, pauses, most=most) if pauses else None,
        stop_chains(history, stops, most=most) if stops else None,
        profiled_pauses(history, pauses, most=most) if beside.profiles else None,
        profiled_stops(history, stops, most=most) if beside.profiles else None,
        slurm_sheet(beside),
        goodput_sheet(figures),
    ]
    return [sheet_table(sheet) for sheet in sheets if sheet is not None and sheet.rows]


def _last_words(history: History, beside: Beside) -> Sequence[str]:
    clocks = history.alignment.sentences() if history.lives else []
    return [*clocks, *beside.sentences(history)]


def _broken(heading: str) -> str:
    """One word to a line, so that numbers decide how wide a column is."""
    return heading.replace(" ", "\n")


def _about_pauses(
    history: History, figures: Mapping[str, Any], max_rows: int
) -> list[RenderableType]:
    if not history.pauses:
        return []
    parts: list[RenderableType] = [pauses_table(history, max_rows=max_rows)]
    left_out = len(history.pauses) - max_rows
    if left_out > 0:
        parts.append(Text(f"{left_out} later pauses are left out; the figures below are of all."))
    return [*parts, summary_table(figures), *map(Text, _together_sentences(history, figures))]


def _together_sentences(history: History, figures: Mapping[str, Any]) -> list[str]:
    """What a suspend could have found in the middle of something."""
    said = []
    if in_flight := figures["in_flight"]:
        said.append(
            f"{_counted(in_flight, 'pause')} with collectives in flight (! above): such a suspend "
            "has to be shorter than their time-out."
        )
    alone = sum(
        pause.all_parked_us is None and pause.parked_mono_ns is not None
        for life in history.lives
        if life.world_size > 1
        for pause in life.pauses
    )
    if alone:
        said.append(f"{_counted(alone, 'pause')} ended before all ranks were parked.")
    return said


def _about_stops(
    history: History, figures: Mapping[str, Any], max_rows: int
) -> list[RenderableType]:
    parts: list[RenderableType] = [stops_table(history, max_rows=max_rows)]
    left_out = len(history.stopped) - max_rows
    if left_out > 0:
        parts.append(Text(f"{left_out} later stops are left out; the figures below are of all."))
    sentences = [Text(sentence) for sentence in stop_sentences(history, figures)]
    return [*parts, stops_summary(figures), *sentences]


def _heading(figures: Mapping[str, Any]) -> str:
    jobs = ", ".join(map(str, figures["job_ids"]))
    parts = [
        f"run {figures['run']}",
        f"job {jobs}" if jobs else "no Slurm job",
        _counted(figures["ranks"], "rank"),
        f"observed {figures['observed_s']:.1f} s",
    ]
    if figures["restarts"]:
        parts.append(_counted(figures["restarts"], "requeue"))
    if figures["stops"]["count"]:
        parts.append(_counted(figures["stops"]["count"], "stop"))
    return ", ".join(parts)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
