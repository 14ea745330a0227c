"""The latencies written into the timeline: how large, which way, and which of them find room."""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.axes import Axes

from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause

BAR = 0.34
"""Height of a lane's bar; lanes are 1 apart."""

INK = "#222222"

_PLOT_IN = 10.2  # what the margins and the names of the ranks leave of the picture's width
_LANES_IN = 38.0  # the most that all lanes together may be high


@dataclass(frozen=True)
class PlacedPause:
    """A pause and where it lies, in seconds since the run's begin."""

    begin_s: float
    end_s: float
    pause: Pause


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
    def fitting(cls, history: History) -> Labels:
        lying = cls(size_pt=8, lane_in=0.75, gap_in=0.62)
        upright = cls(size_pt=6.5, lane_in=1.2, gap_in=0.105, upright=True)
        lanes = max(1, len(history.ranks))
        crowded = any(lying._left_out(history, rank) for rank in history.ranks)
        if upright.lane_in * lanes <= _LANES_IN and crowded:
            return upright
        if lying.lane_in * lanes <= _LANES_IN:
            return lying
        return cls(size_pt=0, lane_in=_LANES_IN / lanes, gap_in=0)

    def draw(self, axes: Axes, history: History, rank: int, *, lane: int) -> int:
        """Write those that find room; returns how many were left out."""
        kept = self._kept(history, rank)
        for one in kept:
            axes.annotate(
                _latency(one.pause), (one.begin_s, lane - BAR / 2), xytext=(0, 6),
                textcoords="offset points", fontsize=self.size_pt, color=INK,
                rotation=90 if self.upright else 0, ha="center" if self.upright else "left",
                va="bottom",
            )  # fmt: skip
        return self._left_out(history, rank)

    def _left_out(self, history: History, rank: int) -> int:
        return len(pauses_in_time(history, rank)) - len(self._kept(history, rank))

    def _kept(self, history: History, rank: int) -> list[PlacedPause]:
        """The pauses whose label does not cover the one before."""
        gap_s = self.gap_in / _PLOT_IN * history.observed_s
        kept: list[PlacedPause] = []
        for one in pauses_in_time(history, rank) if self.size_pt else ():
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
