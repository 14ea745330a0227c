"""The picture of an elastic run: how many members trained, over time, and why that changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_WORDS = {"join": "joined", "leave": "left", "start": "began"}


def draw_sizes(ledger: Iterable[Mapping[str, Any]], *, title: str) -> Figure | None:
    """Draw the sizes of the generations in a ledger (``elastic/ledger.jsonl``) into a new figure;
    None where no generation has begun."""
    entries = list(ledger)
    generations = [one for one in entries if one["kind"] == "generation"]
    if not generations:
        return None
    began_ns = min(int(one["epoch_ns"]) for one in entries)
    end_ns = max(int(one["epoch_ns"]) for one in entries)
    times_s, sizes = [], []
    for one in generations:
        times_s.append((int(one["epoch_ns"]) - began_ns) / 1e9)
        sizes.append(len(one["members"]))
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    ends_s = [*times_s, (end_ns - began_ns) / 1e9]
    axes.stairs(sizes, ends_s, baseline=0, fill=True, color="#4c9f70", alpha=0.35)
    axes.stairs(sizes, ends_s, baseline=None, color="#2f6b4a", linewidth=2)
    for one, at_s, size in zip(generations, times_s, sizes, strict=True):
        axes.annotate(
            f"{_why(one)}\n{1e3 * float(one['pause_s']):.0f} ms, step {one['step']}",
            (at_s, size),
            xytext=(4, 5),
            textcoords="offset points",
            fontsize=7,
        )
    axes.set_ylim(0, max(sizes) + 1)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("time since the run began (s)")
    axes.set_ylabel("members that train")
    axes.set_title(title, fontsize=10, loc="left")
    return figure


def _why(generation: Mapping[str, Any]) -> str:
    if generation["lost"]:
        return f"{', '.join(generation['lost'])} died"
    if generation["left"] and generation["joined"]:
        return f"{', '.join(generation['joined'])} for {', '.join(generation['left'])}"
    word = _WORDS.get(str(generation["cause"]).partition(" ")[0], "changed")
    names = generation["left"] or generation["joined"]
    return f"{', '.join(names) if len(names) < 3 else len(names)} {word}"
