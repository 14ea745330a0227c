"""The comparison in docs/comparison.md: a Markdown table with a remark on each peer, and a picture
with a panel per figure and a bar per peer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, THEIRS = "#0072B2", "#C8C8C8"  # told apart in grey print, too: dark and light


@dataclass(frozen=True)
class Column:
    """A figure of each peer.

    Attributes:
        head: of the table's column, with the unit.
        axis: of the picture's panel, where it is another.
        absent: what is said where there was nothing to measure.
        zero: what is said of 0.
        logarithmic: the picture's axis.
        drawn: whether the picture has a panel for it.
    """

    key: str
    head: str
    axis: str = ""
    absent: str = "–"
    zero: str = "0"
    logarithmic: bool = False
    drawn: bool = True

    def text(self, value: float | bool | None) -> str:
        """A value as the table and the picture show it."""
        if value is None:
            return self.absent
        if isinstance(value, bool):
            return "yes" if value else "no"
        if value == 0:
            return self.zero
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


_EVENTS = {
    "suspend": "suspend of some seconds",
    "preempt": "urgent job",
    "requeue": "requeue by an operator",
    "failure": "failure of its node",
}
FINISH = (
    Column("minutes", "minutes until done"),
    Column("goodput", "goodput: ideal / that"),
    Column("away_s", "in the queue and starting, s"),
    Column("paused_s", "paused, s"),
    Column("steps_lost", "steps trained again"),
    Column("times_by_hand", "started again by hand"),
)
COLUMNS = (
    Column("goodput", "goodput", axis="goodput (dashed: the most that Slurm leaves)"),
    Column("steps_lost_per_preemption", "steps lost per preemption"),
    Column("samples_seen_twice", "samples seen twice"),
    Column("samples_never_seen", "samples never seen"),
    Column("equal_bits", "the bits of an undisturbed run", drawn=False),
    Column("times_by_hand", "started again by hand", drawn=False),
    Column("signal_to_parked_ms_p50", "signal → parked, ms", zero="0: in the same operator"),
    Column("resume_command_to_first_operator_ms_p50", "resume → first operator, ms"),
    Column("signal_to_durable_ms_p50", "signal → durable, ms", absent="never", logarithmic=True),
)


def table(result: Mapping[str, Any], columns: Sequence[Column]) -> str:
    """The table, the storm, where it was measured; of :data:`COLUMNS` a remark on each peer too."""
    where = result["environment"]
    lines = [
        f"| | version | {' | '.join(column.head for column in columns)} |",
        f"| --- | --- |{' --- |' * len(columns)}",
    ]
    peers = result["peers"]
    for peer in peers.values():
        shown = {**peer, "times_by_hand": len(peer["by_hand"])}
        cells = [column.text(shown.get(column.key)) for column in columns]
        if not peer["finished"]:
            cells[0] = "did not finish"
        lines.append(f"| {peer['title']} | {peer['version']} | {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            _storm(result),
            "",
            *(
                f"- **{peer['title']}**: {peer['remark']}{_by_hand(peer)}"
                for peer in peers.values()
                if columns is COLUMNS
            ),
            "",
            f"Measured {where['date']} on {where['cpu_count']} cores of {where['cpu_model']}, "
            f"Python {where['python']}, torch {where['torch']}, Slurm {result['slurm_version']}.",
        ]
    )


BLOCKS = {"finish": FINISH, "compare": COLUMNS}
"""The blocks of docs/comparison.md: the columns of each, by the name of its result."""


def _storm(result: Mapping[str, Any]) -> str:
    kinds = Counter(event["kind"] for event in result["events"])
    events = ", ".join(f"{count} × {_EVENTS[kind]}" for kind, count in kinds.items())
    return (
        f"The storm: {events}, at the same moments for each. The ideal is the bare script without "
        f"them, {result['steps'] * result['bare_step_ms'] / 6e4:.2f} minutes for "
        f"{result['steps']:,} steps. What the suspends and Slurm's own wait leave of it at most is "
        f"{result['goodput_limit']:.3g}."
    )


def _by_hand(peer: Mapping[str, Any]) -> str:
    states = sorted({how.rpartition(" ")[2] for how in peer["by_hand"]})
    return f" It was left {', '.join(states)}, and started again by hand." if states else ""


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.2), layout="constrained")
    figure.suptitle(result["title"], fontsize=12)
    drawn = [column for column in COLUMNS if column.drawn]
    axes = list(figure.subplots(2, math.ceil(len(drawn) / 2), sharey=True).flat)
    for panel, column in zip(axes, drawn, strict=False):
        _panel(panel, column, result)
    for unused in axes[len(drawn) :]:
        unused.set_visible(False)
    part = path.with_suffix(".part")
    figure.savefig(part, format="png", dpi=150)
    part.replace(path)


def _panel(panel: Any, column: Column, result: Mapping[str, Any]) -> None:
    peers = list(result["peers"].values())
    values = [peer.get(column.key) for peer in peers]
    there = [value for value in values if value is not None and value > 0]
    # a bar on a logarithmic axis has no natural foot: it stands one decade below the shortest
    top = max(there, default=1.0)
    foot = 10 ** (math.floor(math.log10(min(there, default=1.0))) - 0.3) * column.logarithmic
    if column.logarithmic:
        panel.set_xscale("log")
        panel.set_xlim(foot, top * (top / foot) ** 0.25)
    else:
        panel.set_xlim(0, top * 1.25)
    for row, (peer, value) in enumerate(zip(peers, values, strict=True)):
        shown = max(value or 0.0, foot)
        color = OURS if peer["name"].endswith("hydroslurm") else THEIRS
        panel.barh(row, shown - foot, left=foot, color=color, edgecolor="black", linewidth=0.6)
        panel.annotate(
            column.text(value),
            (max(shown, foot), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )
    if column.key == "goodput":
        panel.set_xlim(0, max(top, result["goodput_limit"]) * 1.25)
        panel.axvline(result["goodput_limit"], color="black", linewidth=0.9, linestyle="--")
    panel.set_yticks(range(len(peers)), [peer["title"] for peer in peers])
    panel.set_ylim(len(peers) - 0.4, -0.6)
    panel.set_xlabel(column.axis or column.head, fontsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
