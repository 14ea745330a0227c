"""The latencies written into the timeline: how large, which way, and which of them find room."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.font_manager import FontProperties
from matplotlib.transforms import ScaledTranslation, Transform

from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause

BAR = 0.34
"""Height of a lane's bar; lanes are 1 apart."""

INK = "#222222"

QUICKLY = {"compress_level": 1}
"""For PNGs: the last tenth of their size takes as long as all of the drawing."""

_PLOT_IN = 10.2  # what the margins and the names of the ranks leave of the picture's width
_LANES_IN = 38.0  # the most that all lanes together may be high


class PlacedPause(NamedTuple):
    """A pause and where it lies, in seconds since the run's begin."""

    begin_s: float
    end_s: float
    pause: Pause


Placed = Mapping[int, list[PlacedPause]]
"""By rank, in order of time."""


def pauses_in_time(history: History, rank: int) -> list[PlacedPause]:
    """The pauses of all lives of a rank; one without any stamp cannot be placed.

    One that was not resumed lasts to the last event of its life.
    """
    placed = []
    for life in history.lives_of(rank):
        for pause in life.pauses:
            if pause.begin_mono_ns is not None:
                end_ns = pause.resumed_mono_ns or life.last_mono_ns
                begin_s = history.since_begin_s(life, pause.begin_mono_ns)
                placed.append(PlacedPause(begin_s, history.since_begin_s(life, end_ns), pause))
    return sorted(placed, key=lambda one: one.begin_s)


def above(axes: Axes, points: float) -> Transform:
    """Data, moved up by so many points; below with a negative number."""
    figure = axes.figure
    return axes.transData + ScaledTranslation(0, points / 72, figure.dpi_scale_trans)


def far_apart(moments_s: list[float], gap_s: float) -> list[float]:
    """Of moments in order those that are so far from the last one that was kept."""
    kept: list[float] = []
    for moment_s in moments_s:
        if not kept or moment_s - kept[-1] >= gap_s:
            kept.append(moment_s)
    return kept


@dataclass(frozen=True)
class Labels:
    """How the latencies are written: one way for the whole picture, set by its densest lane.

    Attributes:
        size_pt: of the letters; 0 where there are too many lanes to write anything.
        lane_in: the height of a lane that has room for the text.
        gap_in: how far apart two labels of one lane must be.
        upright: turned by 90 degrees.
    """

    size_pt: float
    lane_in: float
    gap_in: float
    upright: bool = False

    @classmethod
    def fitting(cls, placed: Placed, *, span_s: float) -> Labels:
        lying = cls(size_pt=8, lane_in=0.75, gap_in=0.62)
        upright = cls(size_pt=6.5, lane_in=1.2, gap_in=0.105, upright=True)
        lanes = max(1, len(placed))
        crowded = any(len(lying.kept(mine, span_s=span_s)) < len(mine) for mine in placed.values())
        if upright.lane_in * lanes <= _LANES_IN and crowded:
            return upright
        if lying.lane_in * lanes <= _LANES_IN:
            return lying
        return cls(size_pt=0, lane_in=_LANES_IN / lanes, gap_in=0)

    def draw(self, axes: Axes, mine: list[PlacedPause], *, lane: int, span_s: float) -> int:
        """Write those that find room; returns how many were left out."""
        kept = self.kept(mine, span_s=span_s)
        style: dict[str, Any] = {
            "fontproperties": FontProperties(size=self.size_pt),  # looked up once, not by each
            "transform": above(axes, 6),
            "color": INK,
            "rotation": 90 if self.upright else 0,
            "ha": "center" if self.upright else "left",
            "va": "bottom",
            "parse_math": False,
        }
        for one in kept:
            axes.text(one.begin_s, lane - BAR / 2, _latency(one.pause), **style)
        return len(mine) - len(kept)

    def kept(self, mine: list[PlacedPause], *, span_s: float) -> list[PlacedPause]:
        """The pauses whose label does not cover the one before."""
        gap_s = self.gap_in / _PLOT_IN * span_s
        kept: list[PlacedPause] = []
        for one in mine if self.size_pt else ():
            if not kept or one.begin_s - kept[-1].begin_s >= gap_s:
                kept.append(one)
        return kept


def _latency(pause: Pause) -> str:
    """With the unit that keeps it short; what became of the pause where nothing was measured; and a
    mark where collectives were in flight."""
    if pause.park_us is None:
        return pause.outcome
    mark = " !" if pause.in_flight else ""
    if pause.park_us < 999.5:
        return f"{pause.park_us:.0f} µs{mark}"
    ms = pause.park_us / 1e3
    return f"{ms:.1f} ms{mark}" if ms < 99.95 else f"{ms / 1e3:.2f} s{mark}"
