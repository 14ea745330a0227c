"""The screen of ``top`` for a terminal of a given size. Pure."""

from __future__ import annotations

import time
from collections import Counter

from rich.console import Group
from rich.text import Text

from hydroslurm.core.files import clean
from hydroslurm.observe.table import TOP, layout, style
from hydroslurm.observe.watcher import View

KEYS = "q quit   j k scroll   space page"
_AROUND = 4
"""Lines besides jobs: summary, Slurm's answer, head, keys."""


def page_rows(height: int) -> int:
    """Return how many jobs fit."""
    return max(1, height - _AROUND)


def screen(
    view: View | None,
    *,
    width: int,
    height: int,
    first: int = 0,
    now_epoch_s: float,
    overdue: bool = False,
) -> Group:
    """Return at most ``height`` lines, none wider than the terminal.

    Args:
        first: number of the top row.
        overdue: Slurm has been asked, and its answer is late.
    """
    if view is None:
        message = "asking Slurm ..." if not overdue else "Slurm has not answered yet"
        return Group(_line(message, width))
    rows = view.rows[first : first + page_rows(height)]
    head, lines = layout(TOP, rows, width)
    answer, loud = _answer(view, now_epoch_s, overdue)
    parts = [
        _line(summary(view), width, "bold"),
        _line(answer, width, "bold red" if loud else "dim"),
        _line(head, width, "reverse"),
        *(_line(text, width, style(row)) for text, row in zip(lines, rows, strict=True)),
    ]
    parts += [Text("")] * (height - len(parts) - 1)
    hidden = len(view.rows) - len(rows)
    keys = KEYS if not hidden else f"{KEYS}   {first + 1}-{first + len(rows)} of {len(view.rows)}"
    return Group(*parts[: height - 1], _line(keys, width, "dim"))


def summary(view: View) -> str:
    """Count the jobs in each state, in one line."""
    counts = Counter(row.state.lower() for row in view.rows)
    listed = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    moment = time.strftime("%H:%M:%S", time.localtime(view.epoch_s))
    return f"hydroslurm top  {moment}  jobs: {len(view.rows)}{f' ({listed})' if listed else ''}"


def _answer(view: View, now_epoch_s: float, overdue: bool) -> tuple[str, bool]:
    """Return the second line, and whether it is bad news."""
    if view.error is not None:
        since = "never" if view.answered_epoch_s is None else _ago(view, now_epoch_s)
        return f"Slurm does not answer (last answer: {since}): {clean(view.error)}", True
    if overdue:
        return f"Slurm has not answered again yet (last answer: {_ago(view, now_epoch_s)})", True
    if view.missing:
        return f"Slurm knows no job {', '.join(map(str, view.missing))}", True
    return "LOST: at most so much if preempted now    AGO: since the newest checkpoint", False


def _ago(view: View, now_epoch_s: float) -> str:
    return f"{max(0.0, now_epoch_s - (view.answered_epoch_s or now_epoch_s)):.0f} s ago"


def _line(text: str, width: int, look: str = "") -> Text:
    line = Text(text, style=look, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line
