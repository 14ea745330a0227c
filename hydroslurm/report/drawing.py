"""Draw the pictures of a run beside everything else. Imports little, so that it begins at once."""

from __future__ import annotations

import os
from pathlib import Path

from hydroslurm.core.rundir import RunDir
from hydroslurm.report.aside import Aside
from hydroslurm.report.history import History

MANY_PAUSES = 20_000


class Drawing:
    """Both pictures, in processes of their own: most of the time of a small run is matplotlib's
    import, which one of them does for both, and much of a large one's goes into the timeline.

    A large run is drawn by one process: whatever a child looks at becomes its own copy, and memory
    is what there is least of then.
    """

    def __init__(self, history: History, run: RunDir) -> None:
        self._child = Aside(lambda: _draw(history, run))

    def finish(self) -> None:
        """Wait for both.

        Raises:
            RunFolderError: one of them cannot be written.
        """
        self._child.answer()


def _draw(history: History, run: RunDir) -> bytes:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy starts none then, and may be forked
    from hydroslurm.report import histograms, timeline  # noqa: F401 - matplotlib, once

    if len(history.pauses) > MANY_PAUSES:
        _draw_histograms(history, run.histograms_png)
        return _draw_timeline(history, run.timeline_png)
    other = Aside(lambda: _draw_histograms(history, run.histograms_png))
    try:
        return _draw_timeline(history, run.timeline_png)
    finally:
        other.answer()


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
