"""What a table is before anybody draws it: headings with units, and cells of text. Pure.

A column in which nothing is known is left out; a cell that is not known is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

UNKNOWN = "–"
Row = TypeVar("Row")


@dataclass(frozen=True)
class Sheet:
    """One table.

    Attributes:
        headings: with units.
        rows: as many cells as headings.
        words: how many of the first columns are words, to be set flush left.
        left_out: rows that a table of ``most`` rows has no room for.
        note: a sentence below.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1
    left_out: int = 0
    note: str = ""


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A heading, and what stands below it."""

    heading: str
    cell: Callable[[Row], str | None]
    always: bool = False


def sheet_of(
    title: str,
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    *,
    most: int,
    note: str = "",
    words: int = 1,
) -> Sheet:
    """The first ``most`` rows, with the columns in which anything is known."""
    shown = rows[:most]
    cells = [[column.cell(row) for row in shown] for column in columns]
    kept = [
        (column.heading, values)
        for column, values in zip(columns, cells, strict=True)
        if column.always or any(value is not None and value != UNKNOWN for value in values)
    ]
    body = zip(*(values for _, values in kept), strict=True)
    return Sheet(
        title,
        tuple(heading for heading, _ in kept),
        tuple(tuple(cell or UNKNOWN for cell in row) for row in body),
        words=words,
        left_out=max(0, len(rows) - most),
        note=note,
    )


def form(value: float | None, unit: float, form: str) -> str | None:
    """A number in a unit, None for what is not known; ``d`` takes it as it is."""
    if value is None:
        return None
    return format(int(value), form) if form.endswith("d") else format(value / unit, form)


def plain(value: float | None, form: str) -> str:
    """A number, or the dash."""
    return UNKNOWN if value is None else format(value, form)
