"""The vacated part of a pause in the timeline: device memory on its way, and on the host.

It covers the lower half of the lane's bar, so that the cause of the pause is still seen above it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause
from hydroslurm.report.timeline_lanes import INK, Bar, bars

_YELLOW = "#F0E442"  # of Okabe and Ito's colours the one that no cause has
_LOOKS: dict[str, dict[str, Any]] = {
    "device memory on its way": {"facecolor": "white", "hatch": "||||||", "edgecolor": INK},
    "device memory on the host": {"facecolor": _YELLOW},
}
_WAY, _HOST = _LOOKS


class Vacated(NamedTuple):
    """What one pause did with the device's memory, in nanoseconds of its machine's clock.

    Attributes:
        leaves: the vacate began.
        gone: everything was on the host.
        returns: the restore began.
        back: everything was on the device again. A memory that never came back, because its rank
            was killed or has lost it, ``returns`` and is ``back`` with the attempt's last event.
    """

    leaves: int
    gone: int
    returns: int
    back: int


def vacated_of(attempt: Attempt, pause: Pause) -> Vacated | None:
    """None for a pause that moved nothing."""
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
    """Over the pauses, which have to be drawn before."""
    spans: dict[str, list[Bar]] = {name: [] for name in _LOOKS}
    for lane, rank in enumerate(ranks):
        for attempt, one in _all_vacated(history, rank):
            leaves, gone, returns, back = (history.since_begin_s(attempt, at) for at in one)
            spans[_HOST].append((gone, returns, lane))
            spans[_WAY] += [(leaves, gone, lane), (returns, back, lane)]
    for name, mine in spans.items():
        bars(axes, [bar for bar in mine if bar[1] > bar[0]], top=0.0, lw=0, zorder=3.5,
             **_LOOKS[name])  # fmt: skip
        bars(axes, mine, top=0.0, facecolor="none", edgecolor=INK, lw=0.6, zorder=3.6)


def vacated_legend(history: History) -> list[Patch]:
    """Only where the picture holds it."""
    if all(pause.vacated_mono_ns is None for pause in history.pauses):
        return []
    return [
        Patch(lw=0.6, label=name, **{"edgecolor": INK, **look}) for name, look in _LOOKS.items()
    ]


def _all_vacated(history: History, rank: int) -> Iterator[tuple[Attempt, Vacated]]:
    for attempt in history.attempts_of(rank):
        for pause in attempt.pauses:
            if (found := vacated_of(attempt, pause)) is not None:
                yield attempt, found
