"""Lines of ``top``: cells and columns, fitted to a width. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from hydroslurm.core.files import clean
from hydroslurm.observe.job import LOUD, JobView, WorkAtRisk

NOTHING = "-"
_GAP = "  "


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        rank: higher ones are dropped first if there is no room; up to 9 fit into 80.
        least: minimum width.
        most: maximum width.
        shrinks_to: this if there is no room; 0: not at all.
        right: flush right, for numbers.
        optional: omit it if no job has any.
    """

    title: str
    cell: Callable[[JobView], str]
    rank: int
    least: int = 0
    most: int = 1000
    shrinks_to: int = 0
    right: bool = False
    optional: bool = False


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


def _parked(row: JobView) -> str:
    return NOTHING if row.n_ranks is None else f"{row.parked}/{row.n_ranks}"


def _size(row: JobView) -> str:
    """Format members now, wanted and at most: ``3/4/8``."""
    return NOTHING if row.size is None else "/".join(map(str, row.size))


def _slow(row: JobView) -> str:
    return next((rank.cell for rank in row.slow), NOTHING)


def _goodput(row: JobView) -> str:
    return rate(row.goodput.of_allocated if row.goodput else None)


def _why(row: JobView) -> str:
    return clean(row.loss.why if row.loss else row.reason)


def _number(value: int | None) -> str:
    return NOTHING if value is None else str(value)


COLUMNS = (
    Column("JOB", lambda row: str(row.job.id), 0, 5),
    Column("NAME", lambda row: clean(row.job.name), 5, 6, most=30, shrinks_to=6),
    Column("USER", lambda row: clean(row.job.user), 13, most=12),
    Column("PARTITION", lambda row: clean(row.job.partition), 12, most=14),
    Column("STATE", lambda row: row.state, 1, 9, most=10),
    Column("PARK", _parked, 3, 4, right=True),
    Column("SIZE", _size, 3, 4, right=True, optional=True),
    Column("SLOW", _slow, 2, right=True, optional=True),
    Column("STEP", lambda row: _number(row.step), 4, 5, right=True),
    Column("STEP/S", lambda row: rate(row.steps_per_s), 7, right=True),
    Column("SAVED", lambda row: _number(row.commit_step), 10, right=True),
    Column("AGO", lambda row: duration(row.commit_age_s), 6, 4, right=True),
    Column("PRE", lambda row: str(row.job.restart_count), 8, right=True),
    Column("GOOD", _goodput, 11, right=True),
    Column("LEFT", lambda row: duration(row.left_s), 9, 5, right=True),
    Column("LOST", lambda row: lost(row.loss), 2, 7, right=True),
    Column("WHY", _why, 14, 20, most=70, shrinks_to=20),
)
_NAME = COLUMNS[1]
_NAME_CELLS = 12
"""The name gets this much before the least important columns appear."""
_CORE_RANK = 9


def layout(rows: Sequence[JobView], width: int) -> tuple[str, list[str]]:
    """Return the head, and one line per row, none wider than ``width`` cells."""
    cells = {column: [column.cell(row) for row in rows] for column in COLUMNS}
    wide = {column: _natural(column, texts) for column, texts in cells.items()}
    widths = {column: min(n, column.shrinks_to or n) for column, n in wide.items()}
    shown = [c for c in COLUMNS if not c.optional or any(text != NOTHING for text in cells[c])]
    while len(shown) > 1:
        last = max(shown, key=lambda column: column.rank)
        spare = max(0, min(wide[_NAME], _NAME_CELLS) - widths[_NAME]) * (last.rank > _CORE_RANK)
        if _total(shown, widths) + spare <= width:
            break
        shown.remove(last)
    room = width - _total(shown, widths)
    for column in shown:  # the name grows first, then the reason
        grown = max(0, min(wide[column] - widths[column], room))
        widths[column] += grown
        room -= grown
    head = _line({column: column.title for column in shown}, widths, width)
    lines = [_line({c: cells[c][n] for c in shown}, widths, width) for n in range(len(rows))]
    return head, lines


def style(row: JobView) -> str:
    """Return rich's style: urgent rows stand out, even without colour."""
    if row.job.state in LOUD or row.stuck:
        return "bold red"
    if row.has_ended:
        return "dim"
    at_stake = row.loss is not None and not row.loss.is_nothing
    if row.parked or row.state in ("SUSPENDED", "STOPPING"):
        return "bold yellow" if at_stake else "cyan"
    return ""


def _natural(column: Column, cells: Sequence[str]) -> int:
    head = cell_len(column.title)
    return min(max([head, column.least, *map(cell_len, cells)]), max(column.most, head))


def _total(shown: Sequence[Column], widths: Mapping[Column, int]) -> int:
    return sum(widths[column] for column in shown) + len(_GAP) * (len(shown) - 1)


def _line(cells: Mapping[Column, str], widths: Mapping[Column, int], width: int) -> str:
    parts = []
    for column, text in cells.items():
        room = widths[column]
        if cell_len(text) > room:
            text = set_cell_size(text, room - 1) + "…"
        pad = " " * (room - cell_len(text))
        parts.append(pad + text if column.right else text + pad)
    return set_cell_size(_GAP.join(parts), width).rstrip()
