"""A report as nsys exports it to SQLite: tables, columns, strings; any of them may be absent.

nsys makes a table when it has its first row, so that on a machine without a GPU there is none of
kernels. The schema is described in nsys's user guide ("SQLite Schema Reference"); seen here are
schema 3.0.0 of nsys 2022.4 and what later ones have added to it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.files import clean
from hydroslurm.errors import ProfileError

TID_BITS = 24
"""globalTid = ... pid << 24 | tid; globalPid the same with a tid of 0."""
_LOW = (1 << TID_BITS) - 1


def pid_of(global_id: int) -> int:
    """Of a globalTid or a globalPid."""
    return global_id >> TID_BITS & _LOW


def tid_of(global_tid: int) -> int:
    return global_tid & _LOW


def global_pid_of(global_tid: int) -> int:
    return global_tid & ~_LOW


class Database:
    """One report, read-only, which may be hostile: only tables are read, never a view or a
    column that is computed. What cannot be read is named in ``missing`` and read as nothing."""

    def __init__(
        self, connection: sqlite3.Connection, path: Path, *, tables: frozenset[str]
    ) -> None:
        self.path = path
        self.size_bytes = path.stat().st_size
        self._tables = tables
        self.missing: list[str] = []
        self._connection = connection
        self._columns: dict[str, frozenset[str]] = {}

    def columns(self, table: str) -> frozenset[str]:
        """Of a table; none when there is no such table."""
        if table not in self._tables:
            return frozenset()
        if table not in self._columns:
            rows = self.rows(f"PRAGMA table_xinfo({table})", what=f"the columns of {table}")
            is_plain = all(row[6] == 0 for row in rows)
            self._columns[table] = frozenset(row[1] for row in rows if is_plain)
        return self._columns[table]

    def rows(
        self,
        sql: str,
        values: Sequence[object] = (),
        *,
        what: str,
        integers: Sequence[int] = (),
        if_any: Sequence[int] = (),
    ) -> list[tuple[Any, ...]]:
        """All rows, or those before the place where the file is torn; ``what`` names them then.

        Args:
            integers: number of the columns that hold one; a row with anything else there is none.
            if_any: of those that hold one or nothing.
        """
        got: list[tuple[Any, ...]] = []
        try:
            for row in self._connection.execute(sql, tuple(values)):
                if all(type(row[n]) is int for n in integers) and all(
                    row[n] is None or type(row[n]) is int for n in if_any
                ):
                    got.append(row)
        except sqlite3.Error as error:
            sentence = f"{what}: the file is damaged there ({error}), {len(got)} rows were read"
            if sentence not in self.missing:
                self.missing.append(sentence)
        return got

    def string_ids(self, names: Sequence[str]) -> dict[int, str]:
        """Those of the names that the report holds, by id."""
        if not self.columns("StringIds"):
            return {}
        sql = f"SELECT id, value FROM StringIds WHERE value IN ({', '.join('?' * len(names))})"
        return dict(self.rows(sql, names, what="names", integers=(0,)))

    def event_type(self, name: str, number: int) -> int:
        """The number of an event type: by name where the report names them."""
        if not self.columns("ENUM_NSYS_EVENT_TYPE"):
            return number
        sql = "SELECT id FROM ENUM_NSYS_EVENT_TYPE WHERE name = ?"
        rows = self.rows(sql, (name,), what="event types", integers=(0,))
        return rows[0][0] if rows else number

    def host(self) -> str | None:
        return self._text("TARGET_INFO_SYSTEM_ENV", "Hostname")

    def session_epoch_ns(self) -> int | None:
        """Wall clock of the moment 0 of the report."""
        return self._integer("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")

    def end_ns(self) -> int | None:
        """When the recording ended, in the report's own time."""
        return self._integer("ANALYSIS_DETAILS", "duration")

    def version(self) -> str | None:
        tables = ("EXPORT_META_DATA", "META_DATA_EXPORT")
        found = (self._text(table, "EXPORT_PRODUCT_VERSION") for table in tables)
        return next((value for value in found if value is not None), None)

    def _text(self, table: str, name: str) -> str | None:
        value = self._one(table, f"SELECT value FROM {table} WHERE name = '{name}'")
        return None if value is None else clean(str(value))

    def _integer(self, table: str, column: str) -> int | None:
        value = self._one(table, f"SELECT {column} FROM {table}")
        return value if type(value) is int else None

    def _one(self, table: str, sql: str) -> Any:
        rows = self.rows(sql, what=table) if self.columns(table) else []
        return rows[0][0] if rows else None


@contextlib.contextmanager
def open_database(path: Path) -> Iterator[Database]:
    """Raises ProfileError: no SQLite, not of nsys, or torn before its first table."""
    try:
        # immutable: also on a read-only disk, and no lock file beside somebody else's report
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)
    except sqlite3.Error as error:
        raise ProfileError(f"{path}: cannot be opened: {error}") from None
    with contextlib.closing(connection):
        try:
            # without this SQLite opens no file that is shorter than it was; nothing is written
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
            sql = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"
            tables = frozenset(str(row[0]) for row in connection.execute(sql))
        except sqlite3.Error as error:
            raise ProfileError(
                f"{path}: no SQLite file, or one that is cut off ({error}); wanted a report of "
                "nsys or what `nsys export --type sqlite` makes of it"
            ) from None
        if not tables & {"StringIds", "NVTX_EVENTS", "TARGET_INFO_SESSION_START_TIME"}:
            held = ", ".join(sorted(tables)[:5]) or "no tables"
            raise ProfileError(
                f"{path}: an SQLite file, but not of nsys: it holds {held}; wanted what "
                "`nsys export --type sqlite` writes"
            )
        yield Database(connection, path, tables=tables)


# --- when the device worked: kernels, copies, memsets and graphs --------------------------------
#
# A report has millions of them. SQLite reads them once for each process, block by block, as they
# lie in the file, which is nearly in the order of time; a moment then costs a look at the few
# blocks that it lies in. (Sorting them by time would take ten times as long.)

TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernels",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copies",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memsets",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graphs",
}
"""The last: graphs as a whole. Traced node by node they stand among the kernels."""
BLOCK = 8192


@dataclass(frozen=True)
class _Block:
    """One process's rows among :data:`BLOCK` that lie together."""

    global_pid: int
    table: str
    first_row: int
    first_start_ns: int
    last_start_ns: int
    last_end_ns: int


class Gpu:
    """What the device did for each process. Times are nsys's."""

    def __init__(self, database: Database, *, global_pids: Iterable[int]) -> None:
        self._database = database
        tables = [t for t in TABLES if {"start", "end", "globalPid"} <= database.columns(t)]
        self._blocks = {
            pid_of(one): [b for t in tables for b in _blocks(database, t, one)]
            for one in global_pids
        }

    @property
    def pids(self) -> frozenset[int]:
        """Processes that used a device."""
        return frozenset(pid for pid, blocks in self._blocks.items() if blocks)

    def last_end(self, pid: int, *, before_ns: int) -> int | None:
        """When the last of what started before a moment had ended, which may be after it."""
        ends: list[int] = []
        for block in self._blocks.get(pid, ()):
            if block.last_start_ns < before_ns:
                ends.append(block.last_end_ns)
            elif block.first_start_ns < before_ns:
                ends += self._ask("MAX(end)", "start <", block, before_ns)
        return max(ends, default=None)

    def first_start(self, pid: int, *, since_ns: int) -> int | None:
        starts: list[int] = []
        for block in self._blocks.get(pid, ()):
            if block.first_start_ns >= since_ns:
                starts.append(block.first_start_ns)
            elif block.last_start_ns >= since_ns:
                starts += self._ask("MIN(start)", "start >=", block, since_ns)
        return min(starts, default=None)

    def _ask(self, what: str, where: str, block: _Block, ns: int) -> list[int]:
        sql = (
            f"SELECT {what} FROM {block.table} "
            f"WHERE rowid BETWEEN ? AND ? AND globalPid = ? AND {where} ?"
        )
        values = (block.first_row, block.first_row + BLOCK - 1, block.global_pid, ns)
        rows = self._database.rows(sql, values, what=TABLES[block.table], if_any=(0,))
        return [row[0] for row in rows if row[0] is not None]


def _blocks(database: Database, table: str, global_pid: int) -> list[_Block]:
    what = TABLES[table]
    # not MIN and MAX in one question, for which SQLite would read the whole table
    bounds = f"(SELECT MIN(rowid) FROM {table}), (SELECT MAX(rowid) FROM {table})"
    ((first, last),) = database.rows(f"SELECT {bounds}", what=what) or [(None, None)]
    if first is None or last - first > database.size_bytes:  # no table has rows without bytes
        return []
    sql = (
        f"SELECT MIN(start), MAX(start), MAX(end) FROM {table} "
        "WHERE rowid BETWEEN ? AND ? AND globalPid = ?"
    )
    blocks: list[_Block] = []
    for row in range(first, last + 1, BLOCK):
        values = (row, row + BLOCK - 1, global_pid)
        for found in database.rows(sql, values, what=what, if_any=(0, 1, 2)):
            if None not in found:
                blocks.append(_Block(global_pid, table, row, *found))
    return blocks
