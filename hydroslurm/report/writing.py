"""Write everything that a report consists of into the run folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.report.aside import Aside
from hydroslurm.report.beside import Beside
from hydroslurm.report.figures import write_figures
from hydroslurm.report.history import History
from hydroslurm.report.page import write_page
from hydroslurm.report.rows import Rows
from hydroslurm.report.trace import write_trace
from hydroslurm.rundir import RunDir


def begin_drawing(history: History, run: RunDir) -> Aside:
    """Draw one of the two pictures in a second process: most of the time is matplotlib's import.
    To be called before anything imports numpy."""
    return Aside(lambda: _draw_histograms(history, run.histograms_png))


def write_all(
    history: History,
    beside: Beside,
    figures: Mapping[str, Any],
    rows: Rows,
    run: RunDir,
    *,
    drawing: Aside | None,
) -> Iterator[Path]:
    """Each path when it is written: figures, trace, pictures, and the page that holds them.

    Args:
        drawing: of :func:`begin_drawing`; None draws no pictures.

    Raises:
        RunFolderError: one of them cannot be written.
    """
    yield write_figures(figures, run.figures_json)
    drawn: list[tuple[str, Path]] = []
    yield write_trace(history, run.trace_json)
    if drawing is not None:
        from hydroslurm.report.timeline import write_timeline

        try:
            words = "One lane per rank over time: lives, pauses, stops and what each took"
            drawn.append((words, write_timeline(history, run.timeline_png)))
        finally:
            drawing.answer()
        yield run.timeline_png
        if run.histograms_png.exists():
            drawn.append(("How each latency is spread", run.histograms_png))
            yield run.histograms_png
    yield write_page(history, beside, figures, rows, run.report_html, pictures=drawn)


def _draw_histograms(history: History, path: Path) -> bytes:
    """One of an earlier report does not stay where there is nothing to draw."""
    from hydroslurm.report.histograms import write_histograms

    if write_histograms(history, path) is None:
        path.unlink(missing_ok=True)
    return b""
