"""Picture of a run's pauses and stops: one lane per rank, time from left to right.

Causes differ in colour (Okabe-Ito, distinct for colour-blind readers) and in hatching, which
survives grey print. Each pause shows its request -> parked latency. Dense labels are turned
upright, and those that would still cover their neighbour are omitted, as a note in the picture
says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hydroslurm.report.history import History, summary
from hydroslurm.report.lines import spelled
from hydroslurm.report.pauses import Pause
from hydroslurm.report.stops import steps_lost_total
from hydroslurm.report.timeline_lanes import (
    BAR,
    INK,
    RUNNING,
    Bar,
    above,
    attempts_legend,
    bars,
    draw_attempts,
    draw_stops,
    draw_vacated,
    marks,
    vacated_legend,
)

MOST_LANES = 200
"""Ranks in one picture."""

_WIDTH_IN = 12.0
_PIXELS = 1200
"""Share of the picture's width for lanes."""
_MARK_PIXELS = 6
"""Least distance of marks of one kind, so that none covers the next."""
_LEGEND_COLUMNS = 6


_PLOT_IN = 10.2  # the picture's width without margins and the ranks' names
_LANES_IN = 38.0  # largest height of all lanes together


class PlacedPause(NamedTuple):
    """A pause with its span, in seconds since the run's begin."""

    begin_s: float
    end_s: float
    pause: Pause


Placed = Mapping[int, list[PlacedPause]]
"""By rank, in order of time."""


def _placed_pauses(history: History, rank: int) -> list[PlacedPause]:
    """Place the pauses of all attempts of a rank, except those without any stamp.

    One that was not resumed lasts to the last event of its attempt.
    """
    placed = []
    for attempt in history.attempts_of(rank):
        for pause in attempt.pauses:
            if pause.begin_mono_ns is not None:
                end_ns = pause.resumed_mono_ns or attempt.last_mono_ns
                begin_s = history.since_begin_s(attempt, pause.begin_mono_ns)
                placed.append(PlacedPause(begin_s, history.since_begin_s(attempt, end_ns), pause))
    return sorted(placed, key=lambda p: p.begin_s)


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


def timeline(history: History) -> Figure:
    """Draw the run into a new figure, independent of matplotlib's global state."""
    ranks, span_s = history.ranks[:MOST_LANES], history.observed_s
    placed = {rank: _placed_pauses(history, rank) for rank in ranks}
    labels = _Labels.fitting(placed, span_s=span_s)
    height_in = 1.9 + labels.lane_in * max(1, len(ranks)) + (0.2 if history.stopped else 0.0)
    figure = Figure(figsize=(_WIDTH_IN, height_in))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_autoscale_on(False)
    axes.set_ylim(max(1, len(ranks)) - 0.45, -0.75)
    axes.set_xlim(-0.012 * max(span_s, 1e-3), 1.04 * max(span_s, 1e-3))  # room for the last label
    draw_attempts(axes, history, ranks, with_names=labels.size_pt > 0)
    left_out = draw_stops(axes, history, ranks)
    _draw_pauses(axes, list(placed.values()), pixel_s=span_s / _PIXELS)
    draw_vacated(axes, history, ranks)
    for lane, pauses in enumerate(placed.values()):
        left_out += labels.draw(axes, pauses, lane=lane, span_s=span_s)
    _dress(figure, axes, history, left_out=left_out)
    # matplotlib's layout engines would draw everything twice to measure it
    title_lines = axes.get_title(loc="left").count("\n") + 1
    below_in = 0.72 + 0.2 * _legend_rows(figure) + 0.18 * axes.get_xlabel().count("\n")
    figure.subplots_adjust(
        left=0.35 / _WIDTH_IN + 0.0065 * max(len(f"rank {rank}") for rank in ranks or (0,)),
        right=0.99,
        bottom=below_in / height_in,
        top=1 - (0.15 + 0.21 * title_lines) / height_in,
    )
    return figure


@dataclass(frozen=True)
class _Labels:
    """Style of the latencies' labels: one for the whole picture, set by its densest lane.

    Attributes:
        size_pt: of the letters; 0 if there are too many lanes for any text.
        lane_in: height of a lane with room for the text.
        gap_in: least distance of two labels in a lane.
        upright: turned by 90 degrees.
    """

    size_pt: float
    lane_in: float
    gap_in: float
    upright: bool = False

    @classmethod
    def fitting(cls, placed: Placed, *, span_s: float) -> _Labels:
        lying = cls(size_pt=8, lane_in=0.75, gap_in=0.62)
        upright = cls(size_pt=6.5, lane_in=1.2, gap_in=0.105, upright=True)
        lanes = max(1, len(placed))
        crowded = any(len(lying.kept(lane, span_s=span_s)) < len(lane) for lane in placed.values())
        if upright.lane_in * lanes <= _LANES_IN and crowded:
            return upright
        if lying.lane_in * lanes <= _LANES_IN:
            return lying
        return cls(size_pt=0, lane_in=_LANES_IN / lanes, gap_in=0)

    def draw(self, axes: Axes, pauses: list[PlacedPause], *, lane: int, span_s: float) -> int:
        """Write the labels that fit; return how many were omitted."""
        kept = self.kept(pauses, span_s=span_s)
        style: dict[str, Any] = {
            "fontproperties": FontProperties(size=self.size_pt),  # look it up once, not per label
            "transform": above(axes, 6),
            "color": INK,
            "rotation": 90 if self.upright else 0,
            "ha": "center" if self.upright else "left",
            "va": "bottom",
            "parse_math": False,
        }
        for placed in kept:
            axes.text(placed.begin_s, lane - BAR / 2, _latency(placed.pause), **style)
        return len(pauses) - len(kept)

    def kept(self, pauses: list[PlacedPause], *, span_s: float) -> list[PlacedPause]:
        """Return the pauses whose labels do not cover the one before."""
        gap_s = self.gap_in / _PLOT_IN * span_s
        kept: list[PlacedPause] = []
        for placed in pauses if self.size_pt else ():
            if not kept or placed.begin_s - kept[-1].begin_s >= gap_s:
                kept.append(placed)
        return kept


def _latency(pause: Pause) -> str:
    """Format the latency with the unit that keeps it short, or the outcome if it was not
    measured; mark collectives in flight."""
    if pause.park_us is None:
        return pause.outcome
    return f"{spelled(pause.park_us / 1e6)}{' !' if pause.in_flight else ''}"


def _draw_pauses(axes: Axes, lanes: Sequence[list[PlacedPause]], *, pixel_s: float) -> None:
    """Draw one collection per cause and one line per mark, thinned out to what is visible: a
    hundred thousand pauses take a second."""
    spans: dict[_Look, list[Bar]] = {}
    begins: list[tuple[float, float]] = []
    ends: list[tuple[float, float]] = []
    for lane, pauses in enumerate(lanes):
        alike: dict[_Look, list[tuple[float, float]]] = {}
        for placed in pauses:
            alike.setdefault(_look(placed.pause), []).append((placed.begin_s, placed.end_s))
        for look, all_spans in alike.items():
            merged = _merged(all_spans, pixel_s)
            spans.setdefault(look, []).extend((begin, end, lane) for begin, end in merged)
        above, below = lane - BAR / 2 - 0.03, lane + BAR / 2 + 0.03
        begun = _far_apart([p.begin_s for p in pauses], _MARK_PIXELS * pixel_s)
        begins += [(at_s, above) for at_s in begun]
        resumed = sorted(p.end_s for p in pauses if p.pause.resumed_mono_ns is not None)
        ends += [(at_s, below) for at_s in _far_apart(resumed, _MARK_PIXELS * pixel_s)]
    for look, mine_spans in sorted(spans.items()):
        fill: dict[str, Any] = {"facecolor": look.colour, "hatch": look.hatch, "edgecolor": "white"}
        bars(axes, mine_spans, lw=0, zorder=2, **fill)
        # an outline of fixed width keeps pauses narrower than a pixel visible
        bars(axes, mine_spans, facecolor="none", edgecolor=INK, lw=0.8, zorder=3)
    marks(axes, begins, marker="v", ms=4.5, color=INK, mew=0.4, zorder=5)
    marks(axes, ends, marker="^", ms=4.5, color=INK, mew=0.4, zorder=5)


def _far_apart(moments_s: list[float], gap_s: float) -> list[float]:
    """Return the moments, in order, at least a gap after the last one kept."""
    kept: list[float] = []
    for moment_s in moments_s:
        if not kept or moment_s - kept[-1] >= gap_s:
            kept.append(moment_s)
    return kept


def _merged(spans: Iterable[tuple[float, float]], pixel_s: float) -> list[tuple[float, float]]:
    """Merge spans, ordered by begin, whose gaps would not show."""
    merged: list[tuple[float, float]] = []
    for begin_s, end_s in spans:
        if merged and begin_s - merged[-1][1] < pixel_s:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end_s))
        else:
            merged.append((begin_s, end_s))
    return merged


def _legend_rows(figure: Figure) -> int:
    entries = len(figure.legends[0].get_texts())
    return -(-entries // _LEGEND_COLUMNS)


def _look(pause: Pause) -> _Look:
    """Return the look of the first cause; the table has causes that joined later."""
    return _LOOKS.get(pause.main_cause or "", _UNKNOWN)


def _dress(figure: Figure, axes: Axes, history: History, *, left_out: int) -> None:
    """Add title, axes, legend and notes."""
    ranks = history.ranks
    # matplotlib would read mathematics between two dollars in a name
    axes.set_title(_title(history), loc="left", fontsize=10, parse_math=False)
    note = f"\n{left_out} labels left out for want of room: see figures.json" if left_out else ""
    if left_out:
        note += f". Pauses less than {history.observed_s / _PIXELS:.2g} s apart are drawn as one"
    if len(ranks) > MOST_LANES:
        note += f"\n{len(ranks) - MOST_LANES} more ranks are left out"
        ranks = ranks[:MOST_LANES]
    axes.set_xlabel(f"time since the run's first event (s){note}")
    every = 1 + len(ranks) // 200
    axes.set_yticks(range(0, len(ranks), every), [f"rank {rank}" for rank in ranks[::every]])
    axes.grid(axis="x", lw=0.4, color="#BBBBBB")
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles = _legend(history)
    figure.legend(
        handles=handles, loc="lower center", ncols=min(len(handles), _LEGEND_COLUMNS),
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
    pauses = history.pauses
    parts += _spread("request → parked", (pause.park_us for pause in pauses), ",.0f", "µs")
    all_parked_ms = (
        None if pause.all_parked_us is None else pause.all_parked_us / 1e3 for pause in pauses
    )
    parts += _spread("→ all ranks parked", all_parked_ms, ",.1f", "ms")
    return "\n".join(["  ·  ".join(parts), *_stops_in_title(history)])


def _spread(name: str, values: Iterable[float | None], spec: str, unit: str) -> list[str]:
    """Return nothing if nothing was measured."""
    known = summary(values)
    if not known["count"]:
        return []
    return [f"{name}: median {known['p50']:{spec}} {unit}, max {known['max']:{spec}} {unit}"]


def _stops_in_title(history: History) -> list[str]:
    """Return another line, since a run with both has much to say."""
    if not history.stopped:
        return []
    parts = [f"stops: {len(history.stopped)}"]
    parts += _spread("request → saved", (stop.durable_ms for stop in history.stops), ",.0f", "ms")
    exactly = all(stop.steps_lost_exactly for stop in history.stops)
    lost = steps_lost_total(history.stops)
    parts.append(f"steps lost: {'' if exactly else '≥ '}{lost}")
    return ["  ·  ".join(parts)]


def _legend(history: History) -> list[Patch | Line2D]:
    """Return entries for what the picture contains."""
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
    return [*handles, *vacated_legend(history), *attempts_legend(history)]
