"""A report as nsys exports it to SQLite: tables, columns and strings, any of which may be absent.

nsys makes a table when it has its first row, so that on a machine without a GPU there is none of
kernels. The schema is described in nsys's user guide ("SQLite Schema Reference"); seen here are
schema 3.0.0 of nsys 2022.4 and what later ones have added to it.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
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
        marks = ", ".join("?" * len(names))
        sql = f"SELECT id, value FROM StringIds WHERE value IN ({marks})"
        return (
            dict(self.rows(sql, names, what="names", integers=(0,)))
            if self.columns("StringIds")
            else {}
        )

    def event_type(self, name: str, number: int) -> int:
        """The number of an event type: by name where the report names them."""
        if not self.columns("ENUM_NSYS_EVENT_TYPE"):
            return number
        sql = "SELECT id FROM ENUM_NSYS_EVENT_TYPE WHERE name = ?"
        rows = self.rows(sql, (name,), what="event types", integers=(0,))
        return rows[0][0] if rows else number

    def host(self) -> str | None:
        sql = "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'Hostname'"
        value = self._one("TARGET_INFO_SYSTEM_ENV", sql)
        return None if value is None else clean(str(value))

    def session_epoch_ns(self) -> int | None:
        """Wall clock of the moment 0 of the report."""
        sql = "SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME"
        value = self._one("TARGET_INFO_SESSION_START_TIME", sql)
        return value if type(value) is int else None

    def end_ns(self) -> int | None:
        """When the recording ended, in the report's own time."""
        value = self._one("ANALYSIS_DETAILS", "SELECT duration FROM ANALYSIS_DETAILS")
        return value if type(value) is int else None

    def version(self) -> str | None:
        for table in ("EXPORT_META_DATA", "META_DATA_EXPORT"):
            sql = f"SELECT value FROM {table} WHERE name = 'EXPORT_PRODUCT_VERSION'"
            value = self._one(table, sql)
            if value is not None:
                return clean(str(value))
        return None

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
