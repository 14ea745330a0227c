"""Figures, each declared once with its field, and the tables made from them. Pure.

JSON Schema, reference page, tables, percentiles and histograms all derive from the declarations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from hydroslurm.report.lines import span

UNKNOWN = "–"
Cell = Callable[[Any], str | None]
_UNITS = {"us": ("µs", 1e-6), "ms": ("ms", 1e-3), "s": ("s", 1.0)}


class Column(NamedTuple):
    """A column's heading and cells.

    Attributes:
        heading: with its unit; a newline marks the terminal's line break.
        cell: makes a record's text; None is unknown, shown as a dash.
        optional: drop the column if all of it is unknown.
        left: flush left, for text; numbers are flush right.
        wide: omit it in the terminal.
    """

    heading: str
    cell: Cell
    optional: bool = False
    left: bool = False
    wide: bool = False


class Latency(NamedTuple):
    """A figure whose distribution is shown.

    Attributes:
        key: its name; the suffix is its unit.
        label: the two moments.
        spec: number format.
    """

    key: str
    label: str
    spec: str

    @property
    def unit(self) -> str:
        return _UNITS[self.key.rpartition("_")[2]][0]

    def measured_s(self, records: Sequence[object]) -> list[float]:
        """Return the records' values in seconds, ascending."""
        unit_s = _UNITS[self.key.rpartition("_")[2]][1]
        values = (getattr(record, self.key) for record in records)
        return sorted(value * unit_s for value in values if value is not None)


@functools.cache
def columns_of(kind: Any) -> Mapping[str, Column]:
    """Return a record's columns by field, including those of records within it."""
    columns: dict[str, Column] = {}
    hints = get_type_hints(kind)
    for f in fields(kind):
        if heading := f.metadata["heading"]:
            shown = f.metadata["shown"]
            columns[f.name] = column_of(f.name, heading, f.metadata["spec"], **shown)
        for part in filter(is_dataclass, get_args(hints[f.name])):
            for inner, column in columns_of(part).items():  # type: ignore[arg-type]
                cell = _within(f.name, column.cell)
                columns[f"{f.name}.{inner}"] = column._replace(cell=cell)
    return columns


def column_of(
    name: str, heading: str, spec: str, *, unit: float = 1, since: str = "",
    cell: Cell | None = None, more: bool = False, **how: bool,
) -> Column:  # fmt: skip
    """Make the column of a field.

    Args:
        unit: what it counts in.
        since: field of the stamp that a stamp is counted from.
        cell: makes the text from the record, if a format is not enough.
        more: the column is optional and wide.
        how: ``optional``, ``left`` or ``wide``, as in :class:`Column`.
    """
    how |= {"optional": True, "wide": True} if more else {}

    def shown(row: Any) -> str | None:
        value = getattr(row, name)
        return number(span(getattr(row, since), value, 1) if since else value, spec, unit)

    return Column(heading, cell or shown, **how)


def _within(name: str, cell: Cell) -> Cell:
    return lambda row: None if (part := getattr(row, name)) is None else cell(part)


@functools.cache
def latencies_of(kind: Any) -> tuple[Latency, ...]:
    """Return a record's figures with labels."""
    declared = ((f.name, f.metadata["label"], f.metadata["spec"]) for f in fields(kind))
    return tuple(Latency(*latency) for latency in declared if latency[1])


@dataclass(frozen=True)
class Table:
    """One table, for the terminal and the page.

    Attributes:
        headings: with units; a newline marks the terminal's line break.
        rows: as many cells as headings.
        left: whether each column is flush left.
        left_out: number of rows that did not fit.
        note: sentences below.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[bool, ...]
    left_out: int = 0
    note: str = ""


def table_of(
    title: str,
    columns: Iterable[Column],
    records: Sequence[Any],
    *,
    left_out: int = 0,
    note: str = "",
    wide: bool = False,
) -> Table:
    """Make a table of these records; ``wide``: with its wide columns."""
    kept: list[tuple[Column, list[str | None]]] = []
    for column in columns:
        if wide or not column.wide:
            cells = [column.cell(record) for record in records]
            if not column.optional or any(cell not in (None, UNKNOWN) for cell in cells):
                kept.append((column, cells))
    body = zip(*(cells for _, cells in kept), strict=True)
    return Table(
        title,
        tuple(column.heading for column, _ in kept),
        tuple(tuple(cell or UNKNOWN for cell in row) for row in body),
        left=tuple(column.left for column, _ in kept),
        left_out=left_out,
        note=note,
    )


def number(value: Any, spec: str, unit: float = 1) -> str | None:
    """Format a number in a unit; None if unknown; text and integers as they are."""
    if value is None or isinstance(value, str):
        return value
    return format(int(value), spec) if spec.endswith("d") else format(value / unit, spec)
