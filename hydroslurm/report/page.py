"""The report as one HTML page that needs nothing else: no script, no network, images embedded.

Whatever came from outside, names of runs and operators above all, is escaped by jinja2's
autoescape; a policy in the page itself forbids scripts and foreign addresses, should anything get
through.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from hydroslurm.report.external_sources import ExternalSources
from hydroslurm.report.figures import Figures
from hydroslurm.report.history import History
from hydroslurm.report.rows import Rows
from hydroslurm.report.run_tables import (
    goodput_table,
    latency_table,
    pause_chains,
    pauses_table,
    profiled_pauses,
    profiled_stops,
    slurm_table,
    stop_chains,
    stops_table,
)
from hydroslurm.report.tables import Table

MOST_ROWS = 200
"""Of each table; figures.json has more."""


def page(
    history: History,
    sources: ExternalSources,
    figures: Figures,
    rows: Rows,
    *,
    pictures: Sequence[tuple[str, bytes]],
) -> str:
    """The whole page.

    Args:
        pictures: a description for those who cannot see it, and its PNG.
    """
    # a template per call: nothing is compiled by those who import this
    environment = Environment(
        loader=PackageLoader("hydroslurm.report", package_path=""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    clocks = history.alignment.sentences() if history.attempts else []
    return environment.get_template("page.html.j2").render(
        figures=figures,
        pictures=[(alt, base64.b64encode(png).decode()) for alt, png in pictures],
        tables=list(_tables(history, sources, figures, rows)),
        sentences=[*clocks, *sources.sentences(history)],
    )


def _tables(
    history: History, sources: ExternalSources, figures: Figures, rows: Rows
) -> Iterable[Table]:
    pauses, stops = rows.pauses_in_time, rows.stops_in_time
    found = (
        goodput_table(figures),
        latency_table(figures, "pause", "save", "stop", title="Latencies"),
        pauses_table(history, pauses, most=MOST_ROWS, wide=True),
        pause_chains(history, pauses, most=MOST_ROWS),
        stops_table(history, stops, most=MOST_ROWS, wide=True),
        stop_chains(history, stops, most=MOST_ROWS),
        profiled_pauses(history, pauses, most=MOST_ROWS),
        profiled_stops(history, stops, most=MOST_ROWS),
        slurm_table(sources),
    )
    return (table for table in found if table is not None and table.rows)
