"""Picture of an elastic run: its number of members over time, with the causes of changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_WORDS = {"join": "joined", "leave": "left", "start": "began"}


def draw_sizes(ledger: Iterable[Mapping[str, Any]], *, title: str) -> Figure | None:
    """Draw the sizes of the generations in a ledger (``elastic/ledger.jsonl``) into a new figure;
    None before the first."""
    entries = list(ledger)
    generations = [entry for entry in entries if entry["kind"] == "generation"]
    if not generations:
        return None
    began_ns = min(int(entry["epoch_ns"]) for entry in entries)
    end_ns = max(int(entry["epoch_ns"]) for entry in entries)
    times_s, sizes = [], []
    for generation in generations:
        times_s.append((int(generation["epoch_ns"]) - began_ns) / 1e9)
        sizes.append(len(generation["members"]))
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.add_subplot()
    ends_s = [*times_s, (end_ns - began_ns) / 1e9]
    axes.stairs(sizes, ends_s, baseline=0, fill=True, color="#4c9f70", alpha=0.35)
    axes.stairs(sizes, ends_s, baseline=None, color="#2f6b4a", linewidth=2)
    for g, at_s, size in zip(generations, times_s, sizes, strict=True):
        axes.annotate(
            f"{_why(g)}\n{1e3 * float(g['pause_s']):.0f} ms, step {g['step']}",
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
