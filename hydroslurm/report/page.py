"""The report as one HTML page that needs nothing else: no script, no network, pictures inside.

Whatever came from outside, names of runs and operators above all, is escaped; a policy in the page
itself forbids scripts and foreign addresses, should anything get through.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hydroslurm.report.beside import Beside
from hydroslurm.report.figures import write_whole
from hydroslurm.report.history import History
from hydroslurm.report.rows import Rows
from hydroslurm.report.sheets.core import Sheet
from hydroslurm.report.sheets.pauses import pause_chains, pauses_sheet, profiled_pauses
from hydroslurm.report.sheets.stops import profiled_stops, stop_chains, stops_sheet
from hydroslurm.report.sheets.totals import goodput_sheet, slurm_sheet, summary_sheet

MOST_ROWS = 200
"""Of each table; figures.json has more."""


def write_page(
    history: History,
    beside: Beside,
    figures: Mapping[str, Any],
    rows: Rows,
    path: Path,
    *,
    pictures: Iterable[tuple[str, Path]],
) -> Path:
    """Write the page; returns the path.

    Args:
        pictures: what each shows, for those who cannot see it, and its PNG.

    Raises:
        RunFolderError: the file cannot be written.
    """
    shown = [(words, picture.read_bytes()) for words, picture in pictures]
    text = page(history, beside, figures, rows, pictures=shown)
    return write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))


def page(
    history: History,
    beside: Beside,
    figures: Mapping[str, Any],
    rows: Rows,
    *,
    pictures: Sequence[tuple[str, bytes]],
) -> str:
    """The whole page."""
    title = f"hydroslurm: run {history.name}"
    jobs = ", ".join(map(str, history.job_ids)) or "none"
    facts = (
        f"job {jobs}; ranks {figures['ranks']}; requeues {figures['restarts']}; pauses "
        f"{figures['pauses']}; stops {figures['stops']['count']}; observed "
        f"{figures['observed_s']:,.1f} s; events {figures['events']:,}"
    )
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(facts)}</p>"]
    if not history.lives:
        parts.append("<p>No events yet.</p>")
    parts += [_picture(words, png) for words, png in pictures]
    parts += [_table(sheet) for sheet in _sheets(history, beside, figures, rows)]
    said = [*(history.alignment.sentences() if history.lives else []), *beside.sentences(history)]
    if said:
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in said)
        parts.append(f"<h2>Clocks, and what is missing</h2><ul>{items}</ul>")
    parts.append(f"<footer>{escape(_FOOTER)}</footer>")
    body = "\n".join(parts)
    return _PAGE.format(title=escape(title), style=_STYLE, body=body)


def _sheets(
    history: History, beside: Beside, figures: Mapping[str, Any], rows: Rows
) -> list[Sheet]:
    pauses, stops = rows.pauses_in_time, rows.stops_in_time
    found: list[Sheet | None] = [
        goodput_sheet(figures),
        summary_sheet(figures),
        pauses_sheet(history, pauses, most=MOST_ROWS) if pauses else None,
        pause_chains(history, pauses, most=MOST_ROWS) if pauses else None,
        stops_sheet(history, stops, most=MOST_ROWS) if stops else None,
        stop_chains(history, stops, most=MOST_ROWS) if stops else None,
        profiled_pauses(history, pauses, most=MOST_ROWS) if beside.profiles else None,
        profiled_stops(history, stops, most=MOST_ROWS) if beside.profiles else None,
        slurm_sheet(beside),
    ]
    return [sheet for sheet in found if sheet is not None and sheet.rows]


def _picture(words: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    return f'<p><img alt="{escape(words)}" src="data:image/png;base64,{data}"></p>'


def _table(sheet: Sheet) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet.headings)
    rows = []
    for row in sheet.rows:
        cells = (
            f"<td{' class=w' if index < sheet.words else ''}>{escape(cell)}</td>"
            for index, cell in enumerate(row)
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    below = []
    if sheet.left_out:
        below.append(f"{sheet.left_out:,} more are left out: see figures.json.")
    if sheet.note:
        below.append(sheet.note)
    note = f"<p class=note>{escape(' '.join(below))}</p>" if below else ""
    body = "\n".join(rows)
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f"<section><h2>{escape(sheet.title)}</h2>{table}{note}</section>"


_FOOTER = (
    "Written by hydroslurm report. Every figure: figures.json, described in docs/figures.md. "
    "The same as a trace: open trace.json in ui.perfetto.dev."
)

_STYLE = """
:root { color-scheme: light; }
body { background: #fff; color: #1a1a1a; font: 15px/1.45 system-ui, sans-serif;
       margin: 1.5rem auto; max-width: 78rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem; }
img { border: 1px solid #ccc; height: auto; max-width: 100%; }
section { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th { border-bottom: 2px solid #444; text-align: right; vertical-align: bottom; }
td { border-bottom: 1px solid #ddd; text-align: right; }
th, td { padding: .15rem .55rem; }
th:first-child, td.w { text-align: left; }
.note, footer { color: #444; font-size: .87rem; max-width: 60rem; }
@media print {
  body { font-size: 9pt; margin: 0; max-width: none; }
  section, img, tr { break-inside: avoid; }
  section { overflow: visible; }
  thead { display: table-header-group; }
}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
