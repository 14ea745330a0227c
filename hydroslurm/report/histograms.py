"""How latencies are spread: one histogram for each, over all ranks and attempts of a run.

Bars are hatched, so that a grey print can be read; the lines of the median and of the 99th
percentile differ in their dashes. Both axes say what they count, in units; times are logarithmic,
because a pause inside a long operator takes a hundred times as long as the median one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from hydroslurm.report.history import History, percentile
from hydroslurm.report.stops import Stop

_BINS = 24
_COLUMNS = 3
_MEDIAN = ("median", "#009E73", "-")
_P99 = ("p99", "#D55E00", "--")


@dataclass(frozen=True)
class Latency:
    """One histogram: seconds, in ascending order."""

    title: str
    values_s: tuple[float, ...]
    colour: str
    hatch: str


def latencies(history: History) -> list[Latency]:
    """Those of which anything was measured."""
    pauses, stops = history.pauses, history.stops
    trained = (attempt.progress for attempt in history.attempts if attempt.progress)
    saves = [save for progress in trained for save in progress.saves]
    pausing, resuming, saving = ("#0072B2", "////"), ("#56B4E9", "...."), ("#E69F00", "\\\\\\\\")
    us, ms = 1e-6, 1e-3
    measured: list[tuple[str, Iterable[float | None], float, tuple[str, str]]] = [
        ("pause: signal → parked", (p.park_us for p in pauses), us, pausing),
        ("pause: signal → all ranks parked", (p.all_parked_us for p in pauses), us, pausing),
        ("pause: parked → devices idle", (p.drain_us for p in pauses), us, pausing),
        ("resume → running", (p.resume_us for p in pauses), us, resuming),
        ("save: start → committed", (one.durable_ms for one in saves), ms, saving),
        ("stop: signal → safe point", (one.safe_point_ms for one in stops), ms, saving),
        ("stop: signal → committed", (one.durable_ms for one in stops), ms, saving),
        ("stop: signal → requeued", (one.requeued_ms for one in stops), ms, saving),
        ("stop: end → next attempt's first step", map(_back_s, stops), 1.0, saving),
    ]
    found = []
    for title, values, unit_s, look in measured:
        known = sorted(value * unit_s for value in values if value is not None)
        if known:
            found.append(Latency(title, tuple(known), *look))
    return found


def histograms(found: Sequence[Latency]) -> Figure:
    """Draw at least one latency into a new figure."""
    columns = min(_COLUMNS, len(found))
    rows = math.ceil(len(found) / columns)
    width_in, height_in = 4.0 * columns, 2.4 * rows + 0.35
    figure = Figure(figsize=(width_in, height_in))
    FigureCanvasAgg(figure)
    for index, latency in enumerate(found):
        draw = _draw if _is_spread(latency) else _draw_number
        draw(figure.add_subplot(rows, columns, index + 1), latency)
    figure.subplots_adjust(
        left=0.6 / width_in,
        right=1 - 0.25 / width_in,
        bottom=0.85 / height_in,
        top=1 - 0.5 / height_in,
        hspace=1.0,
        wspace=0.26,
    )
    if any(map(_is_spread, found)):
        lines = [
            Line2D([], [], color=colour, ls=dashes, lw=1.6, label=name)
            for name, colour, dashes in (_MEDIAN, _P99)
        ]
        figure.legend(handles=lines, loc="lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _is_spread(latency: Latency) -> bool:
    return latency.values_s[0] < latency.values_s[-1]


def _back_s(stop: Stop) -> float | None:
    waited_s, first_step_s = stop.waited_s, stop.first_step_s
    return None if waited_s is None or first_step_s is None else waited_s + first_step_s


def _draw_number(axes: Axes, latency: Latency) -> None:
    """One value has no spread: a single bar would say less than the number."""
    axes.set_axis_off()
    axes.set_title(f"{latency.title}\nn = {len(latency.values_s):,}", fontsize=8.5, loc="left")
    number = spelled(latency.values_s[0])
    axes.text(
        0.5, 0.5, number, fontsize=18, ha="center", va="center", color=latency.colour,
        transform=axes.transAxes,
    )  # fmt: skip


def _draw(axes: Axes, latency: Latency) -> None:
    """On an axis that is linear in the logarithm, and labelled in times: matplotlib's logarithmic
    axis makes a hundred ticks that nobody reads."""
    logs = [math.log10(max(value_s, 1e-7)) for value_s in latency.values_s]  # 0 has a place, too
    low = math.floor(logs[0])
    high = max(math.ceil(logs[-1]), low + 1)
    # one polygon: a rectangle per bin takes a quarter longer to draw
    axes.hist(
        logs, bins=_BINS, range=(low, high), histtype="stepfilled", facecolor=latency.colour,
        hatch=latency.hatch, edgecolor="white", lw=0.3,
    )  # fmt: skip
    axes.set_xlim(low, high)
    axes.margins(y=0.12)
    named = []
    for percent, (name, colour, dashes) in ((50, _MEDIAN), (99, _P99)):
        at = percentile(logs, percent)
        named.append(f"{name} {spelled(percentile(list(latency.values_s), percent))}")
        axes.axvline(at, color=colour, ls=dashes, lw=1.6)
    step = max(1, (high - low) // 5)
    powers = range(low, high + 1, step)
    axes.set_xticks(list(powers), [spelled(10.0**power) for power in powers])
    axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
    title = f"{latency.title}\nn = {len(logs):,}, {', '.join(named)}"
    axes.set_title(title, fontsize=8.5, loc="left")
    axes.set_xlabel("time (logarithmic)", fontsize=8)
    axes.set_ylabel("count", fontsize=8)
    axes.tick_params(labelsize=7.5)
    axes.grid(axis="x", lw=0.4, color="#BBBBBB")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def spelled(value_s: float) -> str:
    """A time with the unit that keeps it short."""
    for unit, size_s in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value_s >= size_s * 0.9995:
            return f"{value_s / size_s:.3g} {unit}" if value_s < 999.5 else f"{value_s:,.0f} s"
    return f"{value_s / 1e-9:.3g} ns"
