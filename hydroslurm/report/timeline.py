"""A run's pauses and stops as a picture: one lane per rank, time from left to right.

Causes differ in colour (Okabe-Ito, which colour-blind readers can tell apart) and in hatching,
which survives a grey print. Each pause carries its request -> parked latency; where pauses are too
dense for the text, labels are turned upright, and those that would still cover their neighbour are
left out, which the picture says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hydroslurm.errors import RunFolderError
from hydroslurm.report.figures import summary
from hydroslurm.report.history import History
from hydroslurm.report.labels import BAR, INK, Labels, PlacedPause, pauses_in_time
from hydroslurm.report.lifelines import RUNNING, bars, draw_life, draw_stops, lifeline_legend
from hydroslurm.report.pauses import Pause
from hydroslurm.report.stops import steps_lost_total

_WIDTH_IN = 12.0
_DPI = 120


class _Look(NamedTuple):
    label: str
    colour: str
    hatch: str


_LOOKS = {
    "slurm": _Look("parked: slurm", "#0072B2", "////"),
    "user": _Look("parked: user", "#E69F00", "\\\\\\\\"),
    "api": _Look("parked: api", "#009E73", "...."),
    "terminal": _Look("parked: terminal", "#CC79A7", "xxxx"),
    "peers": _Look("parked: with another rank", "#56B4E9", "----"),
}
_UNKNOWN = _Look("parked: unknown", "#999999", "++")


def write_timeline(history: History, path: Path) -> Path:
    """Draw the run into a PNG; returns the path.

    Raises:
        RunFolderError: the file cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        timeline(history).savefig(part, format="png", dpi=_DPI)
        part.replace(path)
    except OSError as error:
        raise RunFolderError(
            f"cannot write {path}: {error.strerror}. "
            "Use `hydroslurm report --no-picture` to go without"
        ) from error
    return path


def timeline(history: History) -> Figure:
    """The picture as a figure of its own: no global state of matplotlib is read or changed."""
    ranks = history.ranks
    labels = Labels.fitting(history)
    height_in = 1.9 + labels.lane_in * max(1, len(ranks)) + (0.2 if history.stopped else 0.0)
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    left_out = 0
    for lane, rank in enumerate(ranks):
        for life in history.lives_of(rank):
            draw_life(axes, history, life, lane=lane)
        left_out += draw_stops(axes, history, rank, lane=lane)
        _draw_pauses(axes, pauses_in_time(history, rank), lane=lane)
    left_out += sum(labels.draw(axes, history, rank, lane=lane) for lane, rank in enumerate(ranks))
    _dress(figure, axes, history, left_out=left_out)
    return figure


def _draw_pauses(axes: Axes, placed: Sequence[PlacedPause], *, lane: int) -> None:
    """One collection per cause and one line per mark: thousands of pauses are drawn in a second."""
    for look in sorted({_look(one.pause) for one in placed}):
        spans = [(one.begin_s, one.end_s) for one in placed if _look(one.pause) == look]
        fill: dict[str, Any] = {"facecolor": look.colour, "hatch": look.hatch, "edgecolor": "white"}
        bars(axes, spans, lane=lane, lw=0, zorder=2, **fill)
        # an outline of fixed width keeps a pause visible that is narrower than a pixel
        bars(axes, spans, lane=lane, facecolor="none", edgecolor=INK, lw=0.8, zorder=3)
    begins_s = [one.begin_s for one in placed]
    ends_s = [one.end_s for one in placed if one.pause.resumed_mono_ns is not None]
    mark: dict[str, Any] = {"color": INK, "mec": "white", "mew": 0.4, "ms": 4.5, "zorder": 5}
    above, below = lane - BAR / 2 - 0.03, lane + BAR / 2 + 0.03
    axes.plot(begins_s, [above] * len(begins_s), marker="v", ls="", **mark)
    axes.plot(ends_s, [below] * len(ends_s), marker="^", ls="", **mark)


def _look(pause: Pause) -> _Look:
    """By the first cause; others that joined later are in the table."""
    return _LOOKS.get(pause.main_cause or "", _UNKNOWN)


def _dress(figure: Figure, axes: Axes, history: History, *, left_out: int) -> None:
    """Title, axes, legend and notes."""
    ranks, span_s = history.ranks, max(history.observed_s, 1e-3)
    axes.set_title(_title(history), loc="left", fontsize=10)
    note = f"\n{left_out} labels left out for want of room: see figures.json" if left_out else ""
    axes.set_xlabel(f"time since the run's first event (s){note}")
    every = 1 + len(ranks) // 200
    axes.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    axes.set_ylim(max(1, len(ranks)) - 0.45, -0.75)
    axes.set_xlim(-0.012 * span_s, 1.04 * span_s)  # room for a label at the very end
    axes.grid(axis="x", lw=0.4, color="#BBBBBB")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = _legend(history)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), 8),
        fontsize=8, frameon=False, handlelength=1.8,
    )  # fmt: skip
    if not history.pauses and not history.stopped:
        middle: dict[str, Any] = {"transform": axes.transAxes, "ha": "center", "va": "center"}
        axes.text(0.5, 0.75, "nothing was paused", **middle)


def _title(history: History) -> str:
    jobs = ", ".join(map(str, history.job_ids))
    parts = [f"run {history.name}", *([f"job {jobs}"] if jobs else [])]
    if history.pauses or not history.stopped:
        parts.append(f"pauses: {len(history.pauses)}")
    park_us = summary(pause.park_us for pause in history.pauses)
    if park_us["count"]:
        median_us, max_us = park_us["p50"], park_us["max"]
        parts.append(f"request → parked: median {median_us:,.0f} µs, max {max_us:,.0f} µs")
    all_parked_us = summary(pause.all_parked_us for pause in history.pauses)
    if all_parked_us["count"]:
        median_ms, max_ms = all_parked_us["p50"] / 1e3, all_parked_us["max"] / 1e3
        parts.append(f"→ all ranks parked: median {median_ms:,.1f} ms, max {max_ms:,.1f} ms")
    return "\n".join(["  ·  ".join(parts), *_stops_in_title(history)])


def _stops_in_title(history: History) -> list[str]:
    """One more line, because a run with both has much to say."""
    if not history.stopped:
        return []
    parts = [f"stops: {len(history.stopped)}"]
    durable_ms = summary(stop.durable_ms for stop in history.stops)
    if durable_ms["count"]:
        median_ms, max_ms = durable_ms["p50"], durable_ms["max"]
        parts.append(f"request → saved: median {median_ms:,.0f} ms, max {max_ms:,.0f} ms")
    exactly = all(stop.steps_lost_exactly for stop in history.stops)
    lost = steps_lost_total(history.stops)
    parts.append(f"steps lost: {'' if exactly else '≥ '}{lost}")
    return ["  ·  ".join(parts)]


def _legend(history: History) -> list[Patch | Line2D]:
    """Only what the picture holds."""
    handles: list[Patch | Line2D] = [
        Patch(facecolor=RUNNING, edgecolor=INK, lw=0.6, label="running")
    ]
    for look in sorted({_look(pause) for pause in history.pauses}):
        style: dict[str, Any] = {"facecolor": look.colour, "hatch": look.hatch}
        handles.append(Patch(edgecolor="white", lw=0, label=look.label, **style))
    mark: dict[str, Any] = {"color": INK, "ls": "", "ms": 5}
    if history.pauses:
        handles.append(Line2D([], [], marker="v", label="pause requested (+ time to park)", **mark))
        handles.append(Line2D([], [], marker="^", label="resumed", **mark))
    handles += lifeline_legend(history)
    return handles
