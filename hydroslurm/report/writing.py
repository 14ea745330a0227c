"""Write all files of a report into the run folder; no other module here writes.

Each function raises RunFolderError if a file cannot be written.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydroslurm.core.files import write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.history import History
from hydroslurm.report.reading import parallel_map

if TYPE_CHECKING:  # the pictures' process starts before any of this is imported
    from matplotlib.figure import Figure

    from hydroslurm.report.figures import Figures, Report

MANY_PAUSES = 20_000
_TIMELINE_DPI, _HISTOGRAMS_DPI, _SIZES_DPI = 120, 110, 150
_FAST_PNG = {"compress_level": 1}
"""The last tenth of a PNG's size costs as much time to compress as the drawing."""


def write_all(report: Report, run: RunDir, *, pictures: Iterator[None] | None) -> Iterator[Path]:
    """Yield each written path: figures, trace, pictures, and the page that contains them.

    Args:
        pictures: from :func:`start_pictures`; None: no pictures.
    """
    yield write_figures(report.figures, run.figures_json)
    yield write_trace(report.history, run.trace_json)
    drawn: list[tuple[str, Path]] = []
    if pictures is not None:
        list(pictures)
        alt = "One lane per rank over time: attempts, pauses, stops and what each took"
        drawn.append((alt, run.timeline_png))
        if run.histograms_png.exists():
            drawn.append(("The distribution of each latency", run.histograms_png))
        yield from (path for _, path in drawn)
    from hydroslurm.report.views import page

    images = [(alt, path.read_bytes()) for alt, path in drawn]
    text = page(report, pictures=images)
    yield _write(run.report_html, text.encode())


def start_pictures(history: History, run: RunDir) -> Iterator[None]:
    """Start drawing both pictures in another process; iterate to wait for it.

    Most of a small run's time is matplotlib's import. Large runs are drawn in this process, on
    iteration: a fork that touches their pages would copy all of them.
    """
    if len(history.pauses) > MANY_PAUSES:
        return map(_draw, [(history, run)])
    return parallel_map(_draw, [(history, run)])


def _draw(run_of: tuple[History, RunDir]) -> None:
    """Draw both; remove an earlier report's histograms if there are none now."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would only take memory
    history, run = run_of
    write_timeline(history, run.timeline_png)
    if write_histograms(history, run.histograms_png) is None:
        run.histograms_png.unlink(missing_ok=True)


def write_figures(figures: Figures, path: Path) -> Path:
    """Write figures.json; return the path."""
    from hydroslurm.report.figures import figures_text

    return _write(path, figures_text(figures).encode())


def write_trace(history: History, path: Path) -> Path:
    """Write trace.json; return the path."""
    from hydroslurm.report.trace import trace_of

    text = json.dumps(trace_of(history), separators=(",", ":"), allow_nan=False)
    return _write(path, f"{text}\n".encode())


def write_timeline(history: History, path: Path) -> Path:
    """Draw the run into a PNG; return the path."""
    from hydroslurm.report.timeline import timeline

    return _write(path, _png(timeline(history), _TIMELINE_DPI))


def write_histograms(history: History, path: Path) -> Path | None:
    """Draw the latencies into a PNG; return the path, or None if too few were measured."""
    from hydroslurm.report.histograms import draw_histograms, histograms_of

    histograms = histograms_of(history)
    return _write(path, _png(draw_histograms(histograms), _HISTOGRAMS_DPI)) if histograms else None


def write_sizes(ledger: Iterable[Mapping[str, Any]], path: Path, *, title: str) -> Path | None:
    """Draw an elastic run's members into a PNG; return the path, or None before any trained."""
    from hydroslurm.report.sizes import draw_sizes

    figure = draw_sizes(ledger, title=title)
    return _write(path, _png(figure, _SIZES_DPI)) if figure else None


def _png(figure: Figure, dpi: int) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, pil_kwargs=_FAST_PNG)
    return file.getvalue()


def _write(path: Path, content: bytes) -> Path:
    """Write a file of the report's folder atomically."""
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _own_folder(path.parent) as folder:
            write_atomically(folder / path.name, content, mode=0o666)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. "
            "Copy the run folder to a place that you can write, and report on the copy"
        ) from error
    return path


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """Yield the folder as it is now, even if another user replaces it meanwhile.

    When someone reports on another user's run, above all root, a symbolic link must not lead them
    to overwrite files elsewhere.

    Raises:
        OSError: it is a link, or belongs to another user.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(fd).st_uid
        if owner != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to uid {owner}", str(path))
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
