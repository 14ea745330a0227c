"""One table model for the terminal, the page and nsys reports; and how a terminal shows a table.

:mod:`hydroslurm.report.views` renders the same tables as HTML.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

UNKNOWN = "–"
Row = TypeVar("Row")

_ROOMY_COLUMNS = 8
"""Tables with more columns need every character of a terminal of 80."""


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        headings: with units; a newline says where the terminal breaks them.
        rows: as many cells as headings.
        left: whether each column is flush left, as text is; numbers are flush right.
        left_out: how many rows did not fit.
        note: sentences below.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[bool, ...]
    left_out: int = 0
    note: str = ""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A heading and what stands below it.

    Attributes:
        cell: None is unknown, and shown as a dash.
        optional: the column is dropped when nothing in it is known.
        left: flush left.
        wide: only where there is room: not in the terminal.
    """

    heading: str
    cell: Callable[[Row], str | None]
    optional: bool = False
    left: bool = False
    wide: bool = False


def table_of(
    title: str,
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    *,
    most: int,
    note: str = "",
    wide: bool = False,
) -> Table:
    """A table of the first ``most`` rows; with its ``wide`` columns only if asked for."""
    shown = rows[:most]
    kept: list[tuple[Column[Row], list[str | None]]] = []
    for column in columns:
        cells = [column.cell(row) for row in shown]
        is_known = any(cell is not None and cell != UNKNOWN for cell in cells)
        if (wide or not column.wide) and (is_known or not column.optional):
            kept.append((column, cells))
    body = zip(*(cells for _, cells in kept), strict=True)
    return Table(
        title,
        tuple(column.heading for column, _ in kept),
        tuple(tuple(cell or UNKNOWN for cell in row) for row in body),
        left=tuple(column.left for column, _ in kept),
        left_out=max(0, len(rows) - most),
        note=note,
    )


def number(value: float | None, spec: str, unit: float = 1) -> str | None:
    """A number in a unit, None for an unknown one; integer formats take it as it is."""
    if value is None:
        return None
    return format(int(value), spec) if spec.endswith("d") else format(value / unit, spec)


def in_terminal(table: Table) -> RenderableType:
    """A table for a terminal of 80 columns."""
    padding = (0, 1) if len(table.headings) <= _ROOMY_COLUMNS else 0
    shown = RichTable(
        header_style="bold", box=box.SIMPLE_HEAD, padding=padding, collapse_padding=True
    )
    shown.title, shown.title_justify = table.title or None, "left"
    for index, (heading, left) in enumerate(zip(table.headings, table.left, strict=True)):
        if index and not left and "\n" not in heading:
            heading = heading.replace(" ", "\n")  # numbers decide how wide a column is
        widest = max((len(row[index]) for row in table.rows), default=0)
        shown.add_column(
            heading,
            justify="left" if left else "right",
            overflow="fold",
            min_width=min(12, widest) if left else None,
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    parts: list[RenderableType] = [shown]
    if table.left_out:
        parts.append(Text(f"{table.left_out} more are left out: see figures.json."))
    if table.note:
        parts.append(Text(table.note, style="dim"))
    return Group(*parts)
