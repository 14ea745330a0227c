"""Write everything that a report consists of into the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.core.rundir import RunDir
from hydroslurm.report.beside import Beside
from hydroslurm.report.drawing import Drawing
from hydroslurm.report.figures import write_figures
from hydroslurm.report.history import History
from hydroslurm.report.page import write_page
from hydroslurm.report.rows import Rows
from hydroslurm.report.trace import write_trace


def write_all(
    history: History,
    beside: Beside,
    figures: Mapping[str, Any],
    rows: Rows,
    run: RunDir,
    *,
    drawing: Drawing | None,
) -> Iterator[Path]:
    """Each path when it is written: figures, trace, pictures, and the page that holds them.

    Args:
        drawing: None draws no pictures.

    Raises:
        RunFolderError: one of them cannot be written.
    """
    yield write_figures(figures, run.figures_json)
    drawn: list[tuple[str, Path]] = []
    yield write_trace(history, run.trace_json)
    if drawing is not None:
        drawing.finish()
        words = "One lane per rank over time: lives, pauses, stops and what each took"
        drawn.append((words, run.timeline_png))
        if run.histograms_png.exists():
            drawn.append(("How each latency is spread", run.histograms_png))
        yield from (path for _, path in drawn)
    yield write_page(history, beside, figures, rows, run.report_html, pictures=drawn)
