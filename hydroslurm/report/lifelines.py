"""The lives of a rank in the timeline: its processes, what ended them, and the gaps between.

What is told apart by colour is told apart by shape or hatching, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hydroslurm.report.history import History
from hydroslurm.report.labels import BAR, INK
from hydroslurm.report.pauses import Life
from hydroslurm.report.stops import KILLED, Stopped

RUNNING = "#E4E4E4"
_STARTING: dict[str, Any] = {"facecolor": "white", "edgecolor": "#9A9A9A", "hatch": "||||"}
_STOP = "#D55E00"
_SAVED = "#0072B2"
_FIRST_STEP = "#009E73"
_DASHES = (0, (4, 3))
_DOTS = (0, (1, 2))
_FLAG = 0.52
"""How far above its lane a stop is flagged: over the labels of pauses, below the lane before."""
_LETTER = 0.0056
"""Width of a letter in a gap, as a part of the whole picture's."""


@dataclass(frozen=True)
class Gap:
    """Between two lives of a rank, in seconds since the run's begin; closed by the next first
    event."""

    begin_s: float
    end_s: float
    stopped: Stopped


def draw_life(axes: Axes, history: History, life: Life, *, lane: int) -> None:
    """The bar of one process, its start hatched. When it was killed or still runs, dashes follow
    its last event, to the next life of the rank, or to the last event of the run."""
    begin_s = history.begin_s(life)
    end_s = history.since_begin_s(life, life.last_mono_ns)
    bars(axes, [(begin_s, end_s)], lane=lane, facecolor=RUNNING, edgecolor=INK, lw=0.6)
    first_s = _first_step_s(history, life)
    if first_s is not None:
        bars(axes, [(begin_s, first_s)], lane=lane, lw=0, **_STARTING)
        bars(axes, [(begin_s, first_s)], lane=lane, facecolor="none", edgecolor=INK, lw=0.6)
    others = [history.begin_s(other) for other in history.lives_of(life.rank)]
    until_s = min((begin_s for begin_s in others if begin_s > end_s), default=None)
    if not life.ended:
        last_s = history.observed_s if until_s is None else until_s
        axes.plot([end_s, last_s], [lane, lane], color=INK, lw=0.9, ls=_DASHES)
    elif until_s is not None:
        axes.plot([end_s, until_s], [lane, lane], color=INK, lw=1.4, ls=_DOTS)
    if history.several_lives:
        axes.annotate(
            f"life {history.life_number(life)}", (begin_s, lane + BAR / 2), xytext=(2, -3),
            textcoords="offset points", fontsize=7, va="top", color=INK,
        )  # fmt: skip


def draw_stops(axes: Axes, history: History, rank: int, *, lane: int) -> int:
    """Mark requests, saves and first steps, and write into each gap what it cost; returns how many
    of those labels found no room."""
    _mark_stops(axes, history, rank, lane=lane)
    _mark_saves(axes, history, rank, lane=lane)
    first_s = [_first_step_s(history, life) for life in history.lives_of(rank)]
    found_s = [at_s for at_s in first_s if at_s is not None]
    mark: dict[str, Any] = {"color": _FIRST_STEP, "mec": "white", "mew": 0.5, "ms": 7, "zorder": 5}
    axes.plot(found_s, [lane] * len(found_s), marker=">", ls="", **mark)
    return _write_gaps(axes, history, rank, lane=lane)


def bars(axes: Axes, spans: Sequence[tuple[float, float]], *, lane: int, **style: Any) -> None:
    widths = [(begin_s, max(0.0, end_s - begin_s)) for begin_s, end_s in spans]
    axes.broken_barh(widths, (lane - BAR / 2, BAR), **style)


def lifeline_legend(history: History) -> list[Patch | Line2D]:
    """Only what the picture holds."""
    mark: dict[str, Any] = {"ls": "", "ms": 6}
    handles: list[Patch | Line2D] = []
    if any(life.progress and life.progress.first_step_mono_ns for life in history.lives):
        handles.append(Patch(lw=0.6, label="starting: imports, load", **_STARTING))
        handles.append(Line2D([], [], marker=">", color=_FIRST_STEP, label="first step", **mark))
    if history.stop_requests:
        handles.append(Line2D([], [], marker="X", color=_STOP, label="stop requested", **mark))
    if any(stop.durable_ms is not None for stop in history.stops):
        handles.append(Line2D([], [], marker="D", color=_SAVED, label="saved", **mark))
    if any(one.life.ended and one.following for one in history.stopped):
        handles.append(Line2D([], [], color=INK, lw=1.4, ls=_DOTS, label="between two lives"))
    if not all(life.ended for life in history.lives):
        handles.append(Line2D([], [], color=INK, lw=0.9, ls=_DASHES, label="no more events"))
    return handles


def _mark_stops(axes: Axes, history: History, rank: int, *, lane: int) -> None:
    for life in history.lives_of(rank):
        for request in life.stops[:1]:  # Slurm asks twice, within milliseconds
            at_s = history.since_begin_s(life, request.requested_mono_ns)
            axes.plot([at_s, at_s], [lane - _FLAG, lane + BAR / 2], color=_STOP, lw=1.4, zorder=4)
            mark: dict[str, Any] = {"marker": "X", "ms": 7, "mec": "white", "mew": 0.5}
            axes.plot(at_s, lane - _FLAG, color=_STOP, zorder=5, **mark)


def _mark_saves(axes: Axes, history: History, rank: int, *, lane: int) -> None:
    saved_s = [
        history.since_begin_s(one.life, one.life.progress.durable_mono_ns)
        for one in history.stopped
        if one.stop.rank == rank and one.life.progress and one.life.progress.durable_mono_ns
    ]
    mark: dict[str, Any] = {"color": _SAVED, "mec": "white", "mew": 0.5, "ms": 6, "zorder": 6}
    axes.plot(saved_s, [lane] * len(saved_s), marker="D", ls="", **mark)


def _write_gaps(axes: Axes, history: History, rank: int, *, lane: int) -> int:
    """Above the line what was saved, below it how long the job waited."""
    letter_s = _LETTER * max(history.observed_s, 1e-3)
    left_out = 0
    for gap in _gaps(history, rank):
        longest = max(len(line) for line in _cost(gap).splitlines())
        if gap.end_s - gap.begin_s < letter_s * longest:
            left_out += 1
            continue
        middle = ((gap.begin_s + gap.end_s) / 2, lane)
        style: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "ha": "center"}
        axes.annotate(_cost(gap), middle, xytext=(0, 3), va="bottom", color=INK, **style)
        waited = f"{gap.end_s - gap.begin_s:.1f} s"
        axes.annotate(waited, middle, xytext=(0, -3), va="top", color=INK, **style)
    return left_out


def _cost(gap: Gap) -> str:
    """What came of the state."""
    stop = gap.stopped.stop
    words = [KILLED] if stop.left == KILLED else []
    if stop.durable_ms is not None:
        words.append(f"saved in\n{stop.durable_ms:,.0f} ms")
    if stop.steps_lost is not None and (stop.steps_lost or not stop.steps_lost_exactly):
        least = "" if stop.steps_lost_exactly else "≥ "
        words.append(f"{least}{stop.steps_lost:,} steps\nlost")
    return "\n".join(words) or stop.left


def _gaps(history: History, rank: int) -> Iterator[Gap]:
    for one in history.stopped:
        if one.stop.rank == rank and one.following is not None:
            begin_s = history.since_begin_s(one.life, one.life.last_mono_ns)
            yield Gap(begin_s, history.begin_s(one.following), one)


def _first_step_s(history: History, life: Life) -> float | None:
    stamp = life.progress.first_step_mono_ns if life.progress else None
    return None if stamp is None else history.since_begin_s(life, stamp)
