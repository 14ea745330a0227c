"""Figures, each declared once with its field, and the tables made of them. Pure.

The JSON Schema, the reference page, tables, percentiles and histograms all read the declarations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple, get_args, get_type_hints

from hydroslurm.report.lines import span

UNKNOWN = "–"
Cell = Callable[[Any], str | None]
_UNITS = {"us": ("µs", 1e-6), "ms": ("ms", 1e-3), "s": ("s", 1.0)}


class Column(NamedTuple):
    """A heading and what stands below it.

    Attributes:
        heading: with its unit; a newline says where the terminal breaks it.
        cell: makes a record's text; None is unknown, and shown as a dash.
        optional: the column is dropped when nothing in it is known.
        left: flush left, as text is; numbers are flush right.
        wide: only where there is room: not in the terminal.
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
        spec: how a value is printed.
    """

    key: str
    label: str
    spec: str

    @property
    def unit(self) -> str:
        return _UNITS[self.key.rpartition("_")[2]][0]

    def measured_s(self, records: Sequence[object]) -> list[float]:
        """The values of these records in seconds, smallest first."""
        unit_s = _UNITS[self.key.rpartition("_")[2]][1]
        values = (getattr(record, self.key) for record in records)
        return sorted(value * unit_s for value in values if value is not None)


def figure(
    meaning: str,
    heading: str = "",
    spec: str = "",
    *,
    default: Any = None,
    label: str = "",
    unit: float = 1,
    since: str = "",
    cell: Cell | None = None,
    more: bool = False,
    **how: bool,
) -> Any:
    """Declare a field of a dataclass as a figure.

    Args:
        meaning: its description in the schema.
        heading: of its column; without one no table has it.
        spec: the format of a number.
        label: the two moments of a latency whose distribution is shown.
        unit: what the column counts in.
        since: the field of the stamp that a stamp is counted from.
        cell: makes the text from the record, where a format is not enough.
        more: a column that is optional and wide.
        how: ``optional``, ``left`` or ``wide``, as a :class:`Column` has them.
    """
    how |= {"optional": True, "wide": True} if more else {}

    def column(name: str) -> Column:
        def shown(row: Any) -> str | None:
            value = getattr(row, name)
            return number(span(getattr(row, since), value, 1) if since else value, spec, unit)

        return Column(heading, cell or shown, **how)

    declared = {"meaning": meaning, "column": column if heading else None}
    return field(default=default, metadata={**declared, "label": label, "spec": spec})


required = functools.partial(figure, default=MISSING)
"""A figure that whoever makes the record has to give."""


@functools.cache
def columns_of(kind: Any) -> Mapping[str, Column]:
    """The columns of a record by field; those of a record within it, too, if it has any."""
    found: dict[str, Column] = {}
    hints = get_type_hints(kind)
    for one in fields(kind):
        if one.metadata["column"] is not None:
            found[one.name] = one.metadata["column"](one.name)
        for part in filter(is_dataclass, get_args(hints[one.name])):
            for inner, column in columns_of(part).items():  # type: ignore[arg-type]
                cell = _within(one.name, column.cell)
                found[f"{one.name}.{inner}"] = column._replace(cell=cell)
    return found


def _within(name: str, cell: Cell) -> Cell:
    return lambda row: None if (part := getattr(row, name)) is None else cell(part)


@functools.cache
def latencies_of(kind: Any) -> tuple[Latency, ...]:
    """The figures of a record that have a label."""
    declared = ((one.name, one.metadata["label"], one.metadata["spec"]) for one in fields(kind))
    return tuple(Latency(*one) for one in declared if one[1])


@dataclass(frozen=True)
class Table:
    """One table, for the terminal and the page.

    Attributes:
        headings: with units; a newline says where the terminal breaks them.
        rows: as many cells as headings.
        left: whether each column is flush left.
        left_out: how many rows did not fit.
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
    """A table of these records; with its ``wide`` columns only if asked for."""
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
    """A number in a unit, None for an unknown one; a text, and an integer, as it is."""
    if value is None or isinstance(value, str):
        return value
    return format(int(value), spec) if spec.endswith("d") else format(value / unit, spec)
