"""The comparison as one picture: a panel per figure, a bar per peer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from table import Column, measured

OURS, THEIRS = "#0072B2", "#C8C8C8"  # told apart in grey print, too: dark and light


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.2), layout="constrained")
    figure.suptitle(result["title"], fontsize=12)
    drawn = [column for column in measured(result) if column.drawn]
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
    if column.key == "step_time_ratio":
        panel.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    if column.key == "goodput" and result.get("goodput_limit"):
        panel.set_xlim(0, max(top, result["goodput_limit"]) * 1.25)
        panel.axvline(result["goodput_limit"], color="black", linewidth=0.9, linestyle="--")
        panel.annotate(
            "most that Slurm leaves",
            (result["goodput_limit"], 1.0),
            xycoords=("data", "axes fraction"),
            ha="center",
            va="bottom",
            fontsize=8,
        )
    panel.set_yticks(range(len(peers)), [peer["title"] for peer in peers])
    panel.set_ylim(len(peers) - 0.4, -0.6)
    panel.set_xlabel(column.axis, fontsize=9)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
