"""Histograms of latencies, one for each, over all ranks and attempts of a run.

Hatched bars stay readable in grey print; the lines of the median and of the 99th percentile differ
in their dashes. Both axes have units; times are logarithmic, because a pause inside a long operator
takes a hundred times as long as the median one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hydroslurm.report.history import LATENCIES, History, Kind, percentile
from hydroslurm.report.lines import spelled

_BINS = 24
_COLUMNS = 3
_LEAST_VALUES = 10
"""Fewer values make no distribution: the table of latencies says all."""
_MEDIAN = ("median", "#009E73", "-")
_P99 = ("p99", "#D55E00", "--")
_LOOKS = {
    "pause": ("#0072B2", "////"),
    "save": ("#56B4E9", "...."),
    "stop": ("#E69F00", "\\\\\\\\"),
}
"""Colour and hatching of each kind."""


@dataclass(frozen=True)
class Histogram:
    """One histogram: seconds, in ascending order."""

    title: str
    values_s: tuple[float, ...]
    colour: str
    hatch: str


def histograms_of(history: History) -> list[Histogram]:
    """Return one for each latency that was measured often enough and varies."""
    histograms = []
    measured: Mapping[Kind, Sequence[object]]
    measured = {"pause": history.pauses, "save": history.saves, "stop": history.stops}
    for kind, records in measured.items():
        for latency in LATENCIES[kind]:
            values_s = latency.measured_s(records)
            if len(values_s) >= _LEAST_VALUES and values_s[0] < values_s[-1]:
                title = f"{kind}: {latency.label}"
                histograms.append(Histogram(title, tuple(values_s), *_LOOKS[kind]))
    return histograms


def draw_histograms(histograms: Sequence[Histogram]) -> Figure:
    """Draw at least one histogram into a new figure."""
    columns = min(_COLUMNS, len(histograms))
    rows = math.ceil(len(histograms) / columns)
    width_in, height_in = 4.0 * columns, 2.4 * rows + 0.35
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    for index, shown in enumerate(histograms):
        _draw(figure.add_subplot(rows, columns, index + 1), shown)
    figure.subplots_adjust(
        left=0.6 / width_in,
        right=1 - 0.25 / width_in,
        bottom=0.85 / height_in,
        top=1 - 0.5 / height_in,
        hspace=1.0,
        wspace=0.26,
    )
    lines = [
        Line2D([], [], color=colour, ls=dashes, lw=1.6, label=name)
        for name, colour, dashes in (_MEDIAN, _P99)
    ]
    figure.legend(handles=lines, loc="lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _draw(axes: Axes, shown: Histogram) -> None:
    """Draw on a linear axis of logarithms labelled in times: matplotlib's logarithmic axis has a
    hundred ticks."""
    logs = [math.log10(max(value_s, 1e-7)) for value_s in shown.values_s]  # 0 must fit, too
    low = math.floor(logs[0])
    high = max(math.ceil(logs[-1]), low + 1)
    # one polygon: a rectangle per bin takes a quarter longer to draw
    axes.hist(
        logs, bins=_BINS, range=(low, high), histtype="stepfilled", facecolor=shown.colour,
        hatch=shown.hatch, edgecolor="white", lw=0.3,
    )  # fmt: skip
    axes.set_xlim(low, high)
    axes.margins(y=0.12)
    named = []
    for percent, (name, colour, dashes) in ((50, _MEDIAN), (99, _P99)):
        at = percentile(logs, percent)
        named.append(f"{name} {spelled(percentile(list(shown.values_s), percent))}")
        axes.axvline(at, color=colour, ls=dashes, lw=1.6)
    step = max(1, (high - low) // 5)
    powers = range(low, high + 1, step)
    axes.set_xticks(list(powers), [spelled(10.0**power) for power in powers])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    title = f"{shown.title}\nn = {len(logs):,}, {', '.join(named)}"
    axes.set_title(title, fontsize=8.5, loc="left")
    axes.set_xlabel("time (logarithmic)", fontsize=8)
    axes.set_ylabel("count", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(axis="x", lw=0.4, color="#BBBBBB")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
