"""Lines of ``top``: cells and columns, fitted to a width. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from hydroslurm.core.files import clean
from hydroslurm.observe.row import LOUD, Row, WorkAtRisk

NOTHING = "-"
_GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        rank: higher ones are dropped first if there is no room; up to 9 fit into 80.
        least: minimum width; only ``name`` shrinks.
        right: flush right, for numbers.
    """

    title: str
    cell: Callable[[Row], str]
    rank: int
    least: int = 0
    right: bool = False


def duration(seconds: float | None) -> str:
    """Format in at most five characters: ``42s 12m 3h05 2d03h 45d``."""
    if seconds is None:
        return NOTHING
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 100:
        return f"{whole}s"
    if minutes < 100:
        return f"{minutes}m"
    if hours < 24:
        return f"{hours}h{minutes % 60:02d}"
    return f"{days}d{hours % 24:02d}h" if days < 10 else f"{days}d"


def rate(steps_per_s: float | None) -> str:
    """Format with three significant digits."""
    if steps_per_s is None:
        return NOTHING
    if steps_per_s >= 100:
        return f"{steps_per_s:.0f}"
    return f"{steps_per_s:.1f}" if steps_per_s >= 10 else f"{steps_per_s:.2f}"


def lost(loss: WorkAtRisk | None) -> str:
    """Format as ``0``, ``≤42 st`` (steps), ``≤3h05``, or ``?``."""
    if loss is None:
        return NOTHING
    if loss.is_nothing:
        return "0"
    if loss.steps is not None:
        return f"≤{loss.steps} st"
    return f"≤{duration(loss.seconds)}" if loss.seconds is not None else "?"


def _parked(row: Row) -> str:
    return NOTHING if row.ranks is None else f"{row.parked}/{row.ranks}"


def _size(row: Row) -> str:
    """Format members now, wanted and at most: ``3/4/8``."""
    return NOTHING if row.size is None else "/".join(map(str, row.size))


def _number(value: int | None) -> str:
    return NOTHING if value is None else str(value)


COLUMNS = (
    Column("JOB", lambda row: row.job_id, 0, 5),
    Column("NAME", lambda row: clean(row.job.name), 5, 6),
    Column("USER", lambda row: clean(row.job.user), 13),
    Column("PARTITION", lambda row: clean(row.job.partition), 12),
    Column("STATE", lambda row: row.state, 1, 9),
    Column("PARK", _parked, 3, 4, right=True),
    Column("SIZE", _size, 3, 4, right=True),
    Column("SLOW", lambda row: next((r.cell for r in row.facts.slow), NOTHING), 2, right=True),
    Column("STEP", lambda row: _number(row.step), 4, 5, right=True),
    Column("STEP/S", lambda row: rate(row.steps_per_s), 7, right=True),
    Column("SAVED", lambda row: _number(row.commit_step), 10, right=True),
    Column("AGO", lambda row: duration(row.commit_age_s), 6, 4, right=True),
    Column("PRE", lambda row: str(row.job.restart_count), 8, right=True),
    Column("GOOD", lambda row: rate(row.goodput), 11, right=True),
    Column("LEFT", lambda row: duration(row.left_s), 9, 5, right=True),
    Column("LOST", lambda row: lost(row.loss), 2, 7, right=True),
    Column("WHY", lambda row: clean(row.loss.why if row.loss else row.reason), 14, 20),
)
_WIDEST = {"NAME": 30, "USER": 12, "PARTITION": 14, "STATE": 10, "WHY": 70}
_SHORTEST = {"NAME": 6, "WHY": 20}
_NAME_CELLS = 12
"""The name gets this much before the least important columns appear."""
_CORE_RANK = 9


def layout(rows: Sequence[Row], width: int) -> tuple[str, list[str]]:
    """Return the head, and one line per row, none wider than ``width`` cells."""
    cells = {column.title: [column.cell(row) for row in rows] for column in COLUMNS}
    wide = {c.title: _natural(c, cells[c.title]) for c in COLUMNS}
    narrow = {title: min(n, _SHORTEST.get(title, n)) for title, n in wide.items()}
    optional = {"SIZE": any(row.size for row in rows), "SLOW": any(row.facts.slow for row in rows)}
    shown = [column for column in COLUMNS if optional.get(column.title, True)]
    while len(shown) > 1:
        last = max(shown, key=lambda column: column.rank)
        spare = min(wide["NAME"], _NAME_CELLS) - narrow["NAME"] if last.rank > _CORE_RANK else 0
        if _total(shown, narrow) + spare <= width:
            break
        shown.remove(last)
    room = width - _total(shown, narrow)
    widths = dict(narrow)
    for title in _SHORTEST:  # the name grows first, then the reason
        if any(column.title == title for column in shown):
            grown = min(wide[title] - narrow[title], room)
            widths[title] += grown
            room -= grown
    head = _line(shown, [column.title for column in shown], widths, width)
    lines = [
        _line(shown, [cells[column.title][n] for column in shown], widths, width)
        for n in range(len(rows))
    ]
    return head, lines


def style(row: Row) -> str:
    """Return rich's style: urgent rows stand out, even without colour."""
    if row.job.state in LOUD or row.stuck:
        return "bold red"
    if row.is_over:
        return "dim"
    at_stake = row.loss is not None and not row.loss.is_nothing
    if row.parked or row.state in ("SUSPENDED", "STOPPING"):
        return "bold yellow" if at_stake else "cyan"
    return ""


def _natural(column: Column, cells: Sequence[str]) -> int:
    widest = max([cell_len(column.title), column.least, *map(cell_len, cells)])
    return min(widest, max(_WIDEST.get(column.title, widest), cell_len(column.title)))


def _total(shown: Sequence[Column], widths: dict[str, int]) -> int:
    return sum(widths[column.title] for column in shown) + len(_GAP) * (len(shown) - 1)


def _line(shown: Sequence[Column], cells: Sequence[str], widths: dict[str, int], width: int) -> str:
    parts = []
    for column, text in zip(shown, cells, strict=True):
        room = widths[column.title]
        if cell_len(text) > room:
            text = set_cell_size(text, room - 1) + "…"
        pad = " " * (room - cell_len(text))
        parts.append(pad + text if column.right else text + pad)
    return set_cell_size(_GAP.join(parts), width).rstrip()
