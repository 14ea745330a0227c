"""A rank's attempts in the timeline: its processes, their ends, the gaps, and vacated memory.

Whatever differs in colour also differs in shape or hatching.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path
from matplotlib.transforms import ScaledTranslation, Transform

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause
from hydroslurm.report.stops import KILLED, Stop

BAR = 0.34
"""Height of a lane's bar; lanes are 1 apart."""
INK = "#222222"
Bar = tuple[float, float, int]
"""Begin and end in seconds since the run's begin, and the lane."""

RUNNING = "#E4E4E4"
_STARTING: dict[str, Any] = {"facecolor": "white", "edgecolor": "#9A9A9A", "hatch": "||||"}
_STOP = "#D55E00"
_SAVED = "#0072B2"
_FIRST_STEP = "#009E73"
_DASHES = (0, (4, 3))
_DOTS = (0, (1, 2))
_FLAG = 0.52
"""How far above its lane a stop's flag is: over the labels of pauses, below the previous lane."""
_RECTANGLE = (Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY)
_LETTER = 0.0056
"""Width of a letter in a gap, relative to the picture's."""


def draw_attempts(
    axes: Axes, history: History, ranks: Sequence[int], *, with_names: bool = True
) -> None:
    """Draw the bar of each process, with a hatched start. If it was killed or still runs, dashes
    follow its last event, to the rank's next attempt or the run's last event.

    Args:
        with_names: write the attempt's name below each bar; needs room.
    """
    style: dict[str, Any] = {"fontproperties": FontProperties(size=7), "transform": above(axes, -9)}
    style |= {"va": "top", "color": INK, "parse_math": False}
    running: list[Bar] = []
    starting: list[Bar] = []
    silent: list[Bar] = []
    between: list[Bar] = []
    for lane, rank in enumerate(ranks):
        attempts = history.attempts_of(rank)
        begins_s = [history.begin_s(attempt) for attempt in attempts]
        for attempt, begin_s in zip(attempts, begins_s, strict=True):
            end_s = history.since_begin_s(attempt, attempt.last_mono_ns)
            running.append((begin_s, end_s, lane))
            first_s = _first_step_s(history, attempt)
            if first_s is not None:
                starting.append((begin_s, first_s, lane))
            until_s = min((other_s for other_s in begins_s if other_s > end_s), default=None)
            if not attempt.ended:
                silent.append((end_s, history.observed_s if until_s is None else until_s, lane))
            elif until_s is not None:
                between.append((end_s, until_s, lane))
            if history.several_attempts and with_names:
                name = f"attempt {history.attempt_number(attempt)}"
                axes.text(begin_s, lane + BAR / 2, name, **style)
    bars(axes, running, facecolor=RUNNING, edgecolor=INK, lw=0.6)
    bars(axes, starting, lw=0, **_STARTING)
    bars(axes, starting, facecolor="none", edgecolor=INK, lw=0.6)
    _lines(axes, silent, lw=0.9, ls=_DASHES)
    _lines(axes, between, lw=1.4, ls=_DOTS)


def draw_stops(axes: Axes, history: History, ranks: Sequence[int]) -> int:
    """Mark requests, saves and first steps, and write its cost into each gap; return how many of
    those labels did not fit."""
    lanes = {rank: lane for lane, rank in enumerate(ranks)}
    _mark_stops(axes, history, lanes)
    saved = [
        (history.since_begin_s(stopped.attempt, stamp), lanes[stopped.stop.rank])
        for stopped in history.stopped
        if stopped.stop.rank in lanes
        if (stamp := stopped.attempt.progress.saved.durable_mono_ns)
    ]
    marks(axes, saved, marker="D", ms=6, color=_SAVED, zorder=6)
    first_steps = [
        (at_s, lane)
        for rank, lane in lanes.items()
        for attempt in history.attempts_of(rank)
        if (at_s := _first_step_s(history, attempt)) is not None
    ]
    marks(axes, first_steps, marker=">", ms=7, color=_FIRST_STEP, zorder=5)
    return _write_gaps(axes, history, lanes)


def above(axes: Axes, points: float) -> Transform:
    """Return the data transform, moved up by ``points``; down if negative."""
    figure = axes.figure
    return axes.transData + ScaledTranslation(0, points / 72, figure.dpi_scale_trans)


def bars(axes: Axes, spans: Sequence[Bar], *, top: float = -BAR / 2, **style: Any) -> None:
    """Draw all bars as one path: separate hatched polygons take ten times as long and a kilobyte
    each.

    Args:
        top: of the bars, from the middle of the lane; downwards is positive.
    """
    if not spans:
        return
    begin_s, end_s, lane = np.array(spans, dtype=float).T
    right_s, upper, lower = np.maximum(begin_s, end_s), lane + top, lane + BAR / 2
    first = (begin_s, upper)
    corners = (first, (begin_s, lower), (right_s, lower), (right_s, upper), first)
    points = np.array(corners).transpose(2, 0, 1).reshape(-1, 2)
    codes = np.tile(np.array(_RECTANGLE, dtype=Path.code_type), len(spans))
    # not add_patch, which checks every corner again
    axes.add_artist(PathPatch(Path(points, codes), snap=True, **style))


def marks(axes: Axes, places: Sequence[tuple[float, float]], **style: Any) -> None:
    """Draw all marks as one line, with white edges."""
    style = {"mec": "white", "mew": 0.5, "ls": "", **style}
    axes.add_line(Line2D([x for x, _ in places], [y for _, y in places], **style))


def attempts_legend(history: History) -> list[Patch | Line2D]:
    """Return entries for what the picture contains."""
    mark: dict[str, Any] = {"ls": "", "ms": 6}
    handles: list[Patch | Line2D] = []
    if any(attempt.progress.first_step_mono_ns for attempt in history.attempts):
        handles.append(Patch(lw=0.6, label="starting: imports, load", **_STARTING))
        handles.append(Line2D([], [], marker=">", color=_FIRST_STEP, label="first step", **mark))
    if history.stop_requests:
        handles.append(Line2D([], [], marker="X", color=_STOP, label="stop requested", **mark))
    if any(stop.durable_ms is not None for stop in history.stops):
        handles.append(Line2D([], [], marker="D", color=_SAVED, label="saved", **mark))
    if any(stopped.attempt.ended and stopped.following for stopped in history.stopped):
        handles.append(Line2D([], [], color=INK, lw=1.4, ls=_DOTS, label="between two attempts"))
    if not all(attempt.ended for attempt in history.attempts):
        handles.append(Line2D([], [], color=INK, lw=0.9, ls=_DASHES, label="no more events"))
    return handles


def _lines(axes: Axes, spans: Sequence[Bar], **style: Any) -> None:
    segments = [((begin_s, lane), (end_s, lane)) for begin_s, end_s, lane in spans]
    axes.add_collection(LineCollection(segments, colors=INK, **style), autolim=False)


def _mark_stops(axes: Axes, history: History, lanes: Mapping[int, int]) -> None:
    places = [
        (history.since_begin_s(attempt, request.requested_mono_ns), lane)
        for rank, lane in lanes.items()
        for attempt in history.attempts_of(rank)
        for request in attempt.stops[:1]  # Slurm asks twice, within milliseconds
    ]
    poles = [((at_s, lane - _FLAG), (at_s, lane + BAR / 2)) for at_s, lane in places]
    axes.add_collection(LineCollection(poles, colors=_STOP, lw=1.4, zorder=4), autolim=False)
    flags = [(at_s, lane - _FLAG) for at_s, lane in places]
    marks(axes, flags, marker="X", ms=7, color=_STOP, zorder=5)


def _write_gaps(axes: Axes, history: History, lanes: Mapping[int, int]) -> int:
    """Write above the line what was saved, below it how long the job waited."""
    letter_s = _LETTER * max(history.observed_s, 1e-3)
    left_out = 0
    style: dict[str, Any] = {"fontproperties": FontProperties(size=7), "ha": "center"}
    style |= {"color": INK, "parse_math": False}
    for stopped in history.stopped:
        if stopped.following is None or stopped.stop.rank not in lanes:
            continue
        begin_s = history.since_begin_s(stopped.attempt, stopped.attempt.last_mono_ns)
        end_s, cost = history.begin_s(stopped.following), _cost(stopped.stop)
        longest = max((len(line) for line in cost.splitlines()), default=0)
        if end_s - begin_s < letter_s * longest:
            left_out += 1
            continue
        middle = ((begin_s + end_s) / 2, lanes[stopped.stop.rank])
        axes.text(*middle, cost, transform=above(axes, 3), va="bottom", **style)
        waited = f"{end_s - begin_s:.1f} s"
        axes.text(*middle, waited, transform=above(axes, -3), va="top", **style)
    return left_out


def _cost(stop: Stop) -> str:
    """Say what became of the state."""
    parts = [KILLED] if stop.left == KILLED else []
    if stop.durable_ms is not None:
        parts.append(f"saved in\n{stop.durable_ms:,.0f} ms")
    if stop.steps_lost is not None and (stop.steps_lost or not stop.steps_lost_exactly):
        least = "" if stop.steps_lost_exactly else "≥ "
        parts.append(f"{least}{stop.steps_lost:,} steps\nlost")
    return "\n".join(parts) or stop.left


def _first_step_s(history: History, attempt: Attempt) -> float | None:
    stamp = attempt.progress.first_step_mono_ns
    return None if stamp is None else history.since_begin_s(attempt, stamp)


# --- the vacated part of a pause: device memory on its way, and on the host -----------------------
#
# It covers the lower half of the lane's bar, which leaves the pause's cause visible above.

_YELLOW = "#F0E442"  # the one Okabe-Ito colour that no cause has
_VACATED: dict[str, dict[str, Any]] = {
    "device memory on its way": {"facecolor": "white", "hatch": "||||||", "edgecolor": INK},
    "device memory on the host": {"facecolor": _YELLOW},
}
_WAY, _HOST = _VACATED


class Vacated(NamedTuple):
    """Movement of device memory in one pause, in nanoseconds of its host's clock.

    Attributes:
        leaves: the vacate began.
        gone: everything was on the host.
        returns: the restore began.
        back: everything was on the device again. If it never came back, because its rank was
            killed or lost it, ``returns`` and ``back`` are at the attempt's last event.
    """

    leaves: int
    gone: int
    returns: int
    back: int


def vacated_of(attempt: Attempt, pause: Pause) -> Vacated | None:
    """Return None for a pause that moved nothing."""
    gone = pause.vacated_mono_ns
    if gone is None:
        return None
    leaves = gone - int((pause.vacate_s or 0.0) * 1e9)
    back = pause.restored_mono_ns
    if back is None:
        end = max(gone, pause.resumed_mono_ns or attempt.last_mono_ns)
        return Vacated(leaves, gone, end, end)
    return Vacated(leaves, gone, max(gone, back - int((pause.restore_s or 0.0) * 1e9)), back)


def draw_vacated(axes: Axes, history: History, ranks: Sequence[int]) -> None:
    """Draw over the pauses; call it after they are drawn."""
    spans: dict[str, list[Bar]] = {name: [] for name in _VACATED}
    for lane, rank in enumerate(ranks):
        for attempt, vacated in _all_vacated(history, rank):
            leaves, gone, returns, back = (history.since_begin_s(attempt, at) for at in vacated)
            spans[_HOST].append((gone, returns, lane))
            spans[_WAY] += [(leaves, gone, lane), (returns, back, lane)]
    for name, bars_of in spans.items():
        bars(axes, [bar for bar in bars_of if bar[1] > bar[0]], top=0.0, lw=0, zorder=3.5,
             **_VACATED[name])  # fmt: skip
        bars(axes, bars_of, top=0.0, facecolor="none", edgecolor=INK, lw=0.6, zorder=3.6)


def vacated_legend(history: History) -> list[Patch]:
    """Return entries if the picture contains any."""
    if all(pause.vacated_mono_ns is None for pause in history.pauses):
        return []
    return [
        Patch(lw=0.6, label=name, **{"edgecolor": INK, **look}) for name, look in _VACATED.items()
    ]


def _all_vacated(history: History, rank: int) -> Iterator[tuple[Attempt, Vacated]]:
    for attempt in history.attempts_of(rank):
        for pause in attempt.pauses:
            if (vacated := vacated_of(attempt, pause)) is not None:
                yield attempt, vacated
