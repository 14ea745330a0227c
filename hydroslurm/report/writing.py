"""Write everything that a report consists of into the run folder."""

from __future__ import annotations

import contextlib
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

MANY_PAUSES = 20_000


class Drawing:
    """Both pictures, in processes of their own: most of the time of a small run is matplotlib's
    import, and much of a large one's goes into the timeline.

    A large run is drawn by one process: whatever a child looks at becomes its own copy, and memory
    is what there is least of then.
    """

    def __init__(self, history: History, run: RunDir) -> None:
        """To be called before anything imports numpy."""

        def timeline() -> bytes:
            return _draw_timeline(history, run.timeline_png)

        def histograms() -> bytes:
            return _draw_histograms(history, run.histograms_png)

        if len(history.pauses) > MANY_PAUSES:
            self._children = [Aside(lambda: timeline() + histograms())]
        else:
            self._children = [Aside(timeline), Aside(histograms)]

    def finish(self) -> None:
        """Wait for both.

        Raises:
            RunFolderError: one of them cannot be written.
        """
        with contextlib.ExitStack() as all_of_them:
            for child in self._children:
                all_of_them.callback(child.answer)


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


def _draw_timeline(history: History, path: Path) -> bytes:
    from hydroslurm.report.timeline import write_timeline

    write_timeline(history, path)
    return b""


def _draw_histograms(history: History, path: Path) -> bytes:
    """One of an earlier report does not stay where there is nothing to draw."""
    from hydroslurm.report.histograms import write_histograms

    if write_histograms(history, path) is None:
        path.unlink(missing_ok=True)
    return b""
