"""One nsys report: its pauses and stops in the job's own clock, and their tables.

nsys itself exports a report to SQLite. It creates a table with its first row, so without a GPU
there is no table of kernels. Its user guide has the schema ("SQLite Schema Reference"); this code
has read schema 3.0.0 of nsys 2022.4 and later additions. ``hydroslurm/gate/native/marks.h``
explains hydroslurm's marks.

Every timestamp of a :class:`Profile` is CLOCK_MONOTONIC of the profiled host, as in the event log.
A pause here is the one in the log with the same ``pid`` and ``requested_mono_ns``, to the
nanosecond: the NVTX mark carries the signal handler's own timestamp. nsys's own times are accurate
to ``error_ns``.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import os
import shutil
import sqlite3
import stat
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hydroslurm.core.files import clean
from hydroslurm.core.signals import signal_name
from hydroslurm.core.trust import is_trusted
from hydroslurm.errors import NsysMissing, ProfileError
from hydroslurm.report.tables import Column, Table, number, table_of

DOMAIN = "hydroslurm"
CLOCK = "clock"
REQUESTS = ("pause_request", "resume_request", "stop_request")
MOMENTS = ("gate_closed", "at_rest", "gate_opened")
RANGES = (
    "pausing", "parked", "resuming", "draining", "saving", "committing", "requeueing", "vacating",
    "restoring",
)  # fmt: skip
_MARK, _DOMAIN_CREATE = 34, 75
"""Event types, for reports that do not name them."""
_TID_BITS = 24
"""globalTid = ... pid << 24 | tid; globalPid the same with a tid of 0."""
_LOW = (1 << _TID_BITS) - 1
TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernels",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copies",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memsets",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graphs",
}
"""The last one: graphs as a whole. Graphs traced by node are among the kernels."""
_MOST_NS = 1 << 61
"""Times and payloads beyond, of seventy years, are damage."""
BLOCK = 8192
"""Rows that SQLite summarizes together."""
EXPORT_TIMEOUT_S = 1800
"""Reports of gigabytes usually take minutes."""
REPORT_SUFFIX, SQLITE_SUFFIX, _RAW_SUFFIX = ".nsys-rep", ".sqlite", ".qdstrm"

_NEIGHBOURS = 8
"""Marks checked on each side."""
_DRIFT_MAX, _DRIFT_MIN = 500e-6, 10e-6
"""The first is the fastest that the kernel slews CLOCK_MONOTONIC."""
_CLOSE_NS = 10_000_000
"""Marks this close measure each other's delay; the drift is at most 5 us in this time."""
_APART_NS = 1_000_000_000
"""Marks further apart than this measure the drift."""


@dataclass(frozen=True)
class ProfiledPause:
    """One pause of one process. None: not in the report."""

    pid: int
    tid: int | None
    """The last thread parked; None if none had to be held."""
    number: int | None
    """Number of the pause in its process."""
    signal: int
    """0: requested by the program or another rank."""
    requested_mono_ns: int | None
    """When the signal handler ran."""
    parked_mono_ns: int | None
    """When the last thread was put to sleep."""
    drained_mono_ns: int | None
    """When the accelerator had finished all earlier launches."""
    last_kernel_end_mono_ns: int | None
    """End of the last earlier kernel, copy or memset; before the request if the device was
    idle by then."""
    resume_requested_mono_ns: int | None
    """None also if a stop ended the pause."""
    running_mono_ns: int | None
    """When the first thread ran again."""
    first_kernel_mono_ns: int | None
    """Start of the first kernel, copy or memset after that."""
    error_ns: int | None
    """Error bound of nsys's times; None: the clocks could not be aligned."""

    @property
    def unparked_mono_ns(self) -> int | None:
        """When the pause ended: the resume was requested, else the first thread ran. A column of
        the table, which asks for it by name."""
        return self.resume_requested_mono_ns or self.running_mono_ns


@dataclass(frozen=True)
class ProfiledStop:
    """One stop of one process. None: not in the report."""

    pid: int
    signal: int
    """0: requested by the program or another rank."""
    requested_mono_ns: int | None
    saving_mono_ns: int | None
    """When the snapshot began."""
    durable_mono_ns: int | None
    """When its parts were on disk, or the save failed."""
    committed_mono_ns: int | None
    requeued_mono_ns: int | None
    """When Slurm had answered."""
    step: int | None
    """The saved step."""
    error_ns: int | None
    """Error bound of nsys's times; None: the clocks could not be aligned."""


@dataclass(frozen=True)
class Profile:
    """One nsys report."""

    path: Path
    host: str | None
    session_epoch_ns: int | None
    """Wall clock at nsys's time 0."""
    pids: tuple[int, ...]
    """Processes with marks of hydroslurm."""
    pauses: tuple[ProfiledPause, ...]
    """By process, then in order."""
    stops: tuple[ProfiledStop, ...]
    """By process."""
    alignment_error_ns: int | None
    """The largest ``error_ns`` of the above."""
    missing: tuple[str, ...]
    """What a reader would miss in the report, in sentences."""
    epoch_offset_ns: int | None
    """Add it to CLOCK_MONOTONIC for the wall clock, as of nsys's start."""
    version: str | None
    """Version of the nsys that wrote it."""


def read_profile(path: Path) -> Profile:
    """Read ``*.nsys-rep`` or ``*.sqlite``. A cut-off file is read as far as possible.

    An ``.nsys-rep`` is first exported to SQLite, which is kept beside it if possible.

    Raises:
        NsysMissing: the report must be exported, and there is no ``nsys`` here.
        ProfileError: not an nsys report, or unreadable.
    """
    with (
        as_sqlite(path) as exported,
        open_database(exported) as database,
        contextlib.closing(sqlite3.connect(":memory:")) as events,
    ):
        domains = _domains(database)
        processes = sorted({process for process, _ in domains}, key=_pid)
        _copy_events(database, domains, events)
        clocks = events.execute("SELECT at, value FROM events WHERE name = 'clock'").fetchall()
        timebase = Timebase(clocks)
        asked = "SELECT DISTINCT process FROM events WHERE name = 'pause_request'"
        gpu = Gpu(database, [process for (process,) in events.execute(asked)])
        _add_functions(events, timebase, gpu)
        events.executescript(_JOINS)
        pauses = tuple(ProfiledPause(*row) for row in events.execute(_PAUSES))
        stops = tuple(ProfiledStop(*row) for row in events.execute(_STOPS))
        errors_ns = [*(pause.error_ns for pause in pauses), *(stop.error_ns for stop in stops)]
        names = {name for (name,) in events.execute("SELECT DISTINCT name FROM events")}
        epoch_ns = database.integer("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        versions = (
            database.text(table, "EXPORT_PRODUCT_VERSION")
            for table in ("EXPORT_META_DATA", "META_DATA_EXPORT")
        )
        return Profile(
            path=path,
            host=database.text("TARGET_INFO_SYSTEM_ENV", "Hostname"),
            session_epoch_ns=epoch_ns,
            pids=tuple(map(_pid, processes)),
            pauses=pauses,
            stops=stops,
            alignment_error_ns=max((ns for ns in errors_ns if ns is not None), default=None),
            missing=(
                *database.missing,
                *_absent(processes, len(clocks), gpu, timed=not names.isdisjoint(RANGES)),
            ),
            epoch_offset_ns=timebase.epoch_offset_ns(epoch_ns),
            version=next((value for value in versions if value is not None), None),
        )


def _absent(processes: Sequence[int], clocks: int, gpu: Gpu, *, timed: bool) -> Iterator[str]:
    if timed and clocks < 2:
        yield (
            f"{clocks} `clock` mark(s) where two are needed: what nsys timed itself "
            "cannot be converted to the clock of the event log"
        )
    idle = [str(_pid(process)) for process in processes if not gpu.worked_for(process)]
    if processes and len(idle) == len(processes):
        yield "no kernels, copies or memsets: profiled without --trace=cuda, or no GPU was used"
    elif idle:
        yield f"no kernels, copies or memsets of process {', '.join(idle)}"


def _pid(global_pid: int) -> int:
    return global_pid >> _TID_BITS & _LOW


# --- one report alone, for a terminal and as JSON ------------------------------------------------

_US, _MS, _S = 1e3, 1e6, 1e9


class _Latency(NamedTuple):
    """Time between two moments of a pause or stop, as JSON key and column."""

    key: str
    begin: str
    end: str
    heading: str
    unit_ns: float
    spec: str
    optional: bool = False

    def between(self, item: object) -> int | None:
        begin_ns, end_ns = (getattr(item, f"{name}_mono_ns") for name in (self.begin, self.end))
        return None if begin_ns is None or end_ns is None else end_ns - begin_ns

    @property
    def column(self) -> Column:
        return Column(
            self.heading,
            lambda item: number(self.between(item), self.spec, self.unit_ns),
            optional=self.optional,
        )


_ASKED, _RESUME = "requested", "resume_requested"
_OF_PAUSES = (
    _Latency("park_ns", _ASKED, "parked", "request →\nparked\n(µs)", _US, ",.0f"),
    _Latency("drain_ns", _ASKED, "drained", "→ device\nidle\n(µs)", _US, ",.0f", True),
    _Latency("last_kernel_ns", _ASKED, "last_kernel_end", "→ last\nkernel end\n(µs)", _US, ",.0f",
             True),
    _Latency("parked_ns", "parked", "unparked", "parked\n\n(s)", _S, ".3f"),
    _Latency("resume_ns", _RESUME, "running", "resume →\nrunning\n(µs)", _US, ",.0f"),
    _Latency("first_kernel_ns", _RESUME, "first_kernel", "→ first\nkernel\n(µs)", _US, ",.0f",
             True),
)  # fmt: skip
_OF_STOPS = (
    _Latency("saving_ns", _ASKED, "saving", "request →\nsaving\n(ms)", _MS, ",.1f"),
    _Latency("durable_ns", _ASKED, "durable", "→ durable\n\n(ms)", _MS, ",.1f"),
    _Latency("committed_ns", _ASKED, "committed", "→ commit-\nted\n(ms)", _MS, ",.1f"),
    _Latency("requeued_ns", _ASKED, "requeued", "→ requeue\nanswered\n(ms)", _MS, ",.1f"),
)


def profile_figures(profile: Profile) -> dict[str, Any]:
    """Return all of it for JSON: moments as they are, latencies as ``*_ns``; null if unknown."""

    def rows(items: Iterable[object], latencies: Sequence[_Latency]) -> list[dict[str, Any]]:
        return [{**vars(item), **{x.key: x.between(item) for x in latencies}} for item in items]

    return {
        "report": str(profile.path),
        "nsys_version": profile.version,
        "host": profile.host,
        "session_epoch_ns": profile.session_epoch_ns,
        "epoch_offset_ns": profile.epoch_offset_ns,
        "alignment_error_ns": profile.alignment_error_ns,
        "pids": list(profile.pids),
        "pauses": rows(profile.pauses, _OF_PAUSES),
        "stops": rows(profile.stops, _OF_STOPS),
        "missing": list(profile.missing),
    }


def profile_tables(profile: Profile, *, most: int) -> list[Table]:
    """Return tables of the pauses and stops, if any."""
    tables = (
        ("pause", "number", _OF_PAUSES, profile.pauses),
        ("step", "step", _OF_STOPS, profile.stops),
    )
    return [
        table_of(
            "",
            [
                Column("process", lambda item: str(item.pid)),
                Column(counted, lambda item, key=key: number(getattr(item, key), "d")),  # type: ignore[misc]
                # 0: requested by the program or another rank
                Column("signal", lambda item: signal_name(item.signal) if item.signal else "none",
                       left=True),
                *(latency.column for latency in latencies),
                Column("error\n\n(±µs)", lambda item: number(item.error_ns, ",.1f", _US)),
            ],
            records[:most],
            left_out=max(0, len(records) - most),
        )
        for counted, key, latencies, records in tables
        if records
    ]  # fmt: skip


def profile_sentences(profile: Profile) -> list[str]:
    """Return the sentences below the tables: the clocks' error, and what is missing."""
    sentences = []
    if profile.pids and not profile.pauses and not profile.stops:
        sentences.append("Nothing was paused or stopped while nsys recorded.")
    if profile.alignment_error_ns is not None:
        sentences.append(
            "nsys's clock is joined to CLOCK_MONOTONIC, the clock of the event log, to within "
            f"{profile.alignment_error_ns / _US:,.1f} µs; requests carry the stamp of the "
            "signal's handler and have no such error."
        )
    return [*sentences, *(f"Missing: {sentence}." for sentence in profile.missing)]


def profile_heading(profile: Profile) -> str:
    parts = [profile.path.name]
    if profile.host:
        parts.append(f"host {profile.host}")
    if profile.pids:
        plural = "es" if len(profile.pids) > 1 else ""
        parts.append(f"process{plural} {', '.join(map(str, profile.pids))}")
    if profile.version:
        parts.append(f"nsys {profile.version}")
    return " · ".join(parts)


# --- .nsys-rep -> SQLite, by nsys itself: its own format is not documented ------------------------


def find_nsys() -> str | None:
    """Find the program on PATH, else beside this Python, where setup.sh puts it."""
    return shutil.which("nsys") or shutil.which("nsys", path=str(Path(sys.executable).parent))


def profiles_in(folder: Path) -> tuple[Path, ...]:
    """Return a folder's reports by name; of an exported one only the report."""
    paths = {}
    for suffix in (SQLITE_SUFFIX, REPORT_SUFFIX):
        for path in folder.glob(f"*{suffix}"):
            paths[path.name.removesuffix(suffix)] = path
    return tuple(path for _, path in sorted(paths.items()))


@contextlib.contextmanager
def as_sqlite(path: Path) -> Iterator[Path]:
    """Yield ``path`` or its export: beside it if possible, else in a temporary folder that is
    removed afterwards. An export newer than its report is reused if only those who could write
    the report could have made it.

    Raises:
        NsysMissing: it must be exported, and there is no ``nsys``.
        ProfileError: no such file, or nsys cannot export it.
    """
    if not path.is_file():
        raise ProfileError(f"{path}: no such file; wanted a report of nsys, or its SQLite export")
    if path.suffix == _RAW_SUFFIX:
        raise ProfileError(
            f"{path}: what nsys recorded and could not finish, because it was killed or has no "
            "importer; turn it into a report with the QdstrmImporter of the same nsys: "
            f"QdstrmImporter -i {path.name}"
        )
    if path.suffix != REPORT_SUFFIX:
        yield path
        return
    beside = path.with_suffix(SQLITE_SUFFIX)
    is_newer = beside.is_file() and beside.stat().st_mtime_ns >= path.stat().st_mtime_ns
    if is_newer and _is_as_good_as(path, beside):
        yield beside
        return
    nsys = find_nsys()
    if nsys is None:
        raise NsysMissing(
            f"{path}: only nsys can read it, and there is none on PATH; on a machine that has it "
            f"run `nsys export --type sqlite {path.name}` and give {beside.name} instead"
        )
    try:
        beside_it = path.parent if is_trusted(path.parent, shared=True) else None
        temporary = tempfile.TemporaryDirectory(prefix=".nsys-export-", dir=beside_it)
    except OSError:  # another user's report, or a full disk
        temporary = tempfile.TemporaryDirectory(prefix=".nsys-export-")
    with temporary as folder:
        output = Path(folder, beside.name)
        _export(nsys, path, output)
        with contextlib.suppress(OSError):
            output = output.replace(beside) if output.parent.parent == path.parent else output
        yield output


def _is_as_good_as(report: Path, beside: Path) -> bool:
    """Whether an export is as trustworthy as its report: in the same folder only owner and mode
    can differ."""
    status = beside.lstat()
    owners = {os.getuid(), 0, report.stat().st_uid}
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != report.stat().st_gid else 0)
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & others


def _export(nsys: str, report: Path, output: Path) -> None:
    """Export a report; raises ProfileError with nsys's output."""
    argv = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true"]
    try:
        done = subprocess.run(
            [*argv, "--output", str(output), str(report)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=EXPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"{report}: nsys could not export it: {error}") from None
    if done.returncode != 0 or not output.is_file():
        out = [line for line in done.stdout.replace("\r", "\n").splitlines() if line.strip()]
        raise ProfileError(
            f"{report}: `{nsys} export` ended with {done.returncode}: "
            f"{' '.join(out[-3:]) or 'it said nothing'}; a report that was cut off, or of a newer "
            "nsys, has to be exported by the nsys that wrote it"
        )


# --- the file ------------------------------------------------------------------------------------


class Database:
    """One report, read-only, which may be hostile: reads only tables, no views or computed
    columns. ``missing`` names what is unreadable, which reads as empty."""

    def __init__(
        self, connection: sqlite3.Connection, tables: frozenset[str], *, size_bytes: int
    ) -> None:
        self._tables = tables
        self.size_bytes = size_bytes
        self.missing: list[str] = []
        self._connection = connection

    def columns(self, table: str) -> frozenset[str]:
        """Return a table's columns; none if there is no such table."""
        if table not in self._tables:
            return frozenset()
        rows = self.rows(f"PRAGMA table_xinfo({table})", what=f"the columns of {table}")
        return frozenset(row[1] for row in rows if row[6] == 0)

    def rows(
        self,
        sql: str,
        values: Sequence[object] = (),
        *,
        what: str,
        integers: Sequence[int] = (),
        if_any: Sequence[int] = (),
    ) -> Iterator[tuple[Any, ...]]:
        """Yield all rows, or those before the file is torn; ``what`` names them in that case.

        Args:
            integers: indices of columns that must be integers; other rows are skipped.
            if_any: those of them that may be null.
        """
        count = 0
        try:
            for row in self._connection.execute(sql, tuple(values)):
                if all(type(row[n]) is int for n in integers) and all(
                    row[n] is None or type(row[n]) is int for n in if_any
                ):
                    count += 1
                    yield row
        except sqlite3.Error as error:
            sentence = f"{what}: the file is damaged there ({error}), {count} rows were read"
            if sentence not in self.missing:
                self.missing.append(sentence)

    def string_ids(self, names: Sequence[str]) -> dict[int, str]:
        """Return the ids of those names that the report has."""
        if not self.columns("StringIds"):
            return {}
        sql = f"SELECT id, value FROM StringIds WHERE value IN ({', '.join('?' * len(names))})"
        return dict(self.rows(sql, names, what="names", integers=(0,)))

    def event_type(self, name: str, number: int) -> int:
        """Return the number of an event type, by name if the report names them."""
        known = self._first("ENUM_NSYS_EVENT_TYPE", "id", f"name = '{name}'")
        return known if type(known) is int else number

    def text(self, table: str, name: str) -> str | None:
        """Look a name up in a table of names and values."""
        value = self._first(table, "value", f"name = '{name}'")
        return None if value is None else clean(str(value))

    def integer(self, table: str, column: str) -> int | None:
        """Read a column of a table's first row."""
        value = self._first(table, column, "true")
        return value if type(value) is int else None

    def _first(self, table: str, column: str, where: str) -> Any:
        sql = f"SELECT {column} FROM {table} WHERE {where}"
        rows = self.rows(sql, what=table) if self.columns(table) else iter(())
        return next(rows, (None,))[0]


@contextlib.contextmanager
def open_database(path: Path) -> Iterator[Database]:
    """Open a report; raises ProfileError: not SQLite, not nsys's, or torn before any table."""
    try:
        # immutable: works on a read-only disk, leaves no lock file beside another user's report
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True)
    except sqlite3.Error as error:
        raise ProfileError(f"{path}: cannot be opened: {error}") from None
    with contextlib.closing(connection):
        try:
            # otherwise SQLite refuses a truncated file; nothing is written
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
        yield Database(connection, tables, size_bytes=path.stat().st_size)


class _Block(NamedTuple):
    """One process's rows among :data:`BLOCK` contiguous ones."""

    table: str
    first_row: int
    first_start_ns: int
    last_start_ns: int
    last_end_ns: int


class Gpu:
    """Each process's work on the device: kernels, copies, memsets and graphs. Times are nsys's.

    A report has millions. SQLite reads them once per process, block by block, in file order, which
    is nearly that of time; a query then reads only the few blocks around its moment. Reading all
    into Python, or sorting, would take ten times as long.
    """

    def __init__(self, database: Database, global_pids: Iterable[int]) -> None:
        self._database = database
        tables = [t for t in TABLES if {"start", "end", "globalPid"} <= database.columns(t)]
        self._blocks = {
            pid: [block for table in tables for block in _blocks(database, table, pid)]
            for pid in global_pids
        }

    def worked_for(self, global_pid: int) -> bool:
        """Whether the process used a device."""
        return bool(self._blocks.get(global_pid))

    def last_end(self, global_pid: int, *, before_ns: int) -> int | None:
        """End of the last work that started before a moment; may be after it."""
        ends = [
            block.last_end_ns
            if block.last_start_ns < before_ns
            else self._ask("MAX(end)", "start <", block, global_pid, before_ns)
            for block in self._blocks.get(global_pid, ())
            if block.first_start_ns < before_ns
        ]
        return max((end_ns for end_ns in ends if end_ns is not None), default=None)

    def first_start(self, global_pid: int, *, since_ns: int) -> int | None:
        starts = [
            block.first_start_ns
            if block.first_start_ns >= since_ns
            else self._ask("MIN(start)", "start >=", block, global_pid, since_ns)
            for block in self._blocks.get(global_pid, ())
            if block.last_start_ns >= since_ns
        ]
        return min((start_ns for start_ns in starts if start_ns is not None), default=None)

    def _ask(self, what: str, where: str, block: _Block, global_pid: int, ns: int) -> int | None:
        sql = f"SELECT {what} FROM {block.table} WHERE {_OF_BLOCK} AND {where} ?"
        values = (block.first_row, block.first_row + BLOCK - 1, global_pid, ns)
        rows = self._database.rows(sql, values, what=TABLES[block.table], if_any=(0,))
        moment: int | None = next(rows, (None,))[0]
        return moment


_OF_BLOCK = "rowid BETWEEN ? AND ? AND globalPid = ?"


def _blocks(database: Database, table: str, global_pid: int) -> Iterator[_Block]:
    what = TABLES[table]
    # separate queries for MIN and MAX: for both at once SQLite reads the whole table
    sql = f"SELECT (SELECT MIN(rowid) FROM {table}), (SELECT MAX(rowid) FROM {table})"
    first, last = next(database.rows(sql, what=what), (None, None))
    if first is None or last - first > database.size_bytes:  # each row takes bytes
        return
    sql = f"SELECT MIN(start), MAX(start), MAX(end) FROM {table} WHERE {_OF_BLOCK}"
    for row in range(first, last + 1, BLOCK):
        values = (row, row + BLOCK - 1, global_pid)
        for bounds in database.rows(sql, values, what=what, integers=(0, 1, 2)):
            yield _Block(table, row, *bounds)


# --- the marks and ranges of the domain hydroslurm ----------------------------------------------


def _copy_events(
    database: Database, domains: Collection[tuple[int, int]], events: sqlite3.Connection
) -> None:
    """Copy the events of these domains into a table, which holds nothing but numbers that can be
    calculated with; so it can be joined, whoever wrote the report.

    Its columns: ``process``, a global id; ``name``; ``at`` and ``until``, by nsys's clock: the
    latter is null for a mark, and for a range that never ended; ``value``: of a mark the stamp of
    the handler or the event log, of a range the number of its pause, or its step; ``signal``: of a
    request; ``tid``.
    """
    events.execute("CREATE TABLE events (process, name, at, until, value, signal, tid)")
    if not domains:
        return
    ids = database.string_ids([CLOCK, *REQUESTS, *MOMENTS, *RANGES])
    mark = database.event_type("NvtxMark", _MARK)
    last_ns = database.integer("ANALYSIS_DETAILS", "duration")
    category = "category" if "category" in database.columns("NVTX_EVENTS") else "0"
    # by id, which skips millions of operator rows without reading their text
    sql = (
        f"SELECT start, end, eventType, {category}, globalTid, textId, domainId, uint64Value "
        f"FROM NVTX_EVENTS WHERE textId IN ({', '.join('?' * len(ids))}) "
        "AND uint64Value IS NOT NULL"
    )
    rows = database.rows(
        sql, list(ids), what="NVTX events", integers=(0, 2, 4, 5, 6, 7), if_any=(1, 3)
    )
    kept = [
        # nsys ends open ranges with its recording
        (tid & ~_LOW, ids[text], at, None if until == last_ns else until, value, signal, tid & _LOW)
        for at, until, kind, signal, tid, text, domain, value in rows
        if (tid & ~_LOW, domain) in domains
        and (kind == mark) == (ids[text] not in RANGES)
        and max(abs(at), abs(until or 0), abs(value)) < _MOST_NS
    ]
    kept.sort(key=lambda row: row[2])
    events.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?)", kept)


def _domains(database: Database) -> set[tuple[int, int]]:
    """Return process and number of its domain; each process numbers its own. If there are none,
    ``missing`` says why."""
    columns = database.columns("NVTX_EVENTS")
    wanted = {"start", "end", "eventType", "globalTid", "textId", "domainId"}
    domains: set[tuple[int, int]] = set()
    if not columns:
        why = "no NVTX events: profiled without --trace=nvtx, or nothing emitted any"
    elif not wanted <= columns:
        why = f"NVTX events without {', '.join(sorted(wanted - columns))}: unknown schema"
    elif not (domains := _created_domains(database)):
        why = (
            f"no NVTX domain {DOMAIN!r}: hydroslurm was not installed in what was profiled, was "
            "built without NVTX, or HYDROSLURM_NVTX=off"
        )
    elif "uint64Value" not in columns:
        why = "NVTX events without payloads (uint64Value): pauses cannot be distinguished"
    else:
        return domains
    database.missing.append(why)
    return set()


def _created_domains(database: Database) -> set[tuple[int, int]]:
    ids = database.string_ids([DOMAIN])
    create = database.event_type("NvtxDomainCreate", _DOMAIN_CREATE)
    sql = "SELECT globalTid, domainId, text, textId FROM NVTX_EVENTS WHERE eventType = ?"
    return {
        (global_tid & ~_LOW, domain)
        for global_tid, domain, text, text_id in database.rows(
            sql, (create,), what="NVTX domains", integers=(0, 1)
        )
        if text == DOMAIN or text_id in ids
    }


# --- the pauses and the stop of a process ---------------------------------------------------------


def _event(what: str, name: str, where: str, order: str = "at, e.rowid") -> str:
    """Make a subquery: a column of the first event of a name, of the process of ``p``."""
    index = "by_value" if where.startswith("value =") else "by_time"
    return (
        f"(SELECT {what} FROM events e INDEXED BY {index} WHERE e.process = p.process "
        f"AND e.name = '{name}' AND {where} ORDER BY {order} LIMIT 1)"
    )


_LAST = "at DESC, e.rowid DESC"
_MEANWHILE, _OF_PAUSE = "at >= began AND at < ended", "value = number"
_HELD = _event("e.rowid", "parked", f"{_OF_PAUSE} AND at <= IFNULL(paused, at)", "at DESC, e.rowid")
_JOINS = f"""
CREATE INDEX by_time ON events (process, name, at);
CREATE INDEX by_value ON events (process, name, value);
-- a thread may be held before the watcher emits `pausing`
CREATE TABLE begun AS
SELECT process, value AS number, IFNULL(MIN(CASE name WHEN 'pausing' THEN at END), MIN(at)) AS began
FROM events WHERE name IN ('pausing', 'parked', 'resuming', 'draining') GROUP BY process, value;
CREATE TABLE moments AS SELECT p.*,
    {_event("value", "gate_closed", _MEANWHILE)} AS asked,
    {_event("value", "at_rest", _MEANWHILE, _LAST)} AS rest,
    {_event("value", "gate_opened", _MEANWHILE)} AS opened,
    {_event("at", "gate_opened", _MEANWHILE)} AS opened_at,
    {_event("at", "pausing", _OF_PAUSE, _LAST)} AS pausing,
    {_event("until", "pausing", _OF_PAUSE, _LAST)} AS paused,
    {_event("until", "draining", _OF_PAUSE, _LAST)} AS drained,
    {_event("at", "resuming", _OF_PAUSE, _LAST)} AS resuming,
    {_event("until", "resuming", _OF_PAUSE, _LAST)} AS released
FROM (
    SELECT *, LEAD(began, 1, 1e99) OVER (PARTITION BY process ORDER BY number) AS ended FROM begun
) p;
-- a stop opens the gate without a resume; a thread that arrives when all others are held delays
-- nothing
CREATE TABLE requests AS SELECT p.*,
    CASE WHEN {_event("1", "stop_request", "value = opened")} IS NULL THEN opened END AS resumed,
    CASE WHEN pausing IS NULL OR paused IS NOT NULL THEN {_HELD} END AS held
FROM moments p;
-- if no thread was held, the gate's stamp at the first of two checks counts: the range ends with
-- the second. Handlers open the gate, maybe before `resuming`
CREATE TABLE threads AS SELECT p.*, e.tid, IFNULL(at, paused) AS parked,
    CASE WHEN held IS NULL THEN NULLIF(rest, 0) END AS rest_of_quiet,
    {_event("at", "resume_request", "value = resumed")} AS resume_at,
    IFNULL(MIN(nsys(resumed), resuming), IFNULL(nsys(resumed), resuming)) AS since
FROM requests p LEFT JOIN events e ON e.rowid = held;
-- threads that ran before were let through for a collective
CREATE TABLE runs AS SELECT p.*, CASE WHEN since IS NOT NULL THEN
    IFNULL({_event("until", "parked", f"{_OF_PAUSE} AND until >= since", "until")}, released)
    END AS running
FROM threads p;
-- vacated memory is copied after the drain, and copied back before threads run
CREATE TABLE pauses AS SELECT *,
    CASE WHEN parked IS NOT NULL THEN last_end(process, COALESCE(drained, running, parked)) END
    AS last_kernel, first_start(process, running) AS first_kernel
FROM runs;
CREATE INDEX of_process ON pauses (process, number);
CREATE TABLE stops AS SELECT p.*,
    {_event("value", "stop_request", "true")} AS asked,
    {_event("signal", "stop_request", "true")} AS signal,
    IFNULL({_event("at", "stop_request", "true")}, 0) AS since
FROM (SELECT DISTINCT process FROM events WHERE name IN ('stop_request', 'requeueing')) p;
-- a stop waits for a running save, or saves again: the last one counts
CREATE TABLE saves AS SELECT p.*,
    {_event("e.rowid", "saving", "IFNULL(until, since) >= since", _LAST)} AS save,
    {_event("until", "requeueing", "at >= since", _LAST)} AS requeued
FROM stops p;
CREATE TABLE commits AS SELECT p.*, s.at AS saving, s.until AS durable, s.value AS step,
    {_event("until", "committing", "value = s.value AND at >= s.at", _LAST)} AS committed
FROM saves p LEFT JOIN events s ON s.rowid = save;
"""
_PAUSES = f"""
SELECT * FROM (
SELECT pid(process) AS pid, tid, number,
    IFNULL({_event("signal", "pause_request", "value = asked")}, 0), asked,
    IFNULL(rest_of_quiet, mono(parked)), mono(drained), mono(last_kernel), resumed, mono(running),
    mono(first_kernel),
    error(CASE WHEN rest_of_quiet IS NULL THEN parked END, drained, last_kernel, running,
          first_kernel)
FROM pauses p
UNION ALL  -- the recording ended before the gate closed; elsewhere a request without it is none
SELECT pid(process), NULL, NULL, IFNULL(signal, 0), value, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM events e WHERE name = 'pause_request' AND at > IFNULL((
    SELECT CASE WHEN resumed IS NULL THEN 1e99 ELSE IFNULL(resume_at, opened_at) END
    FROM pauses p WHERE p.process = e.process ORDER BY number DESC LIMIT 1), 0)
) ORDER BY pid, number IS NULL, number
"""
_STOPS = """
SELECT pid(process) AS pid, IFNULL(signal, 0), asked, mono(saving), mono(durable), mono(committed),
    mono(requeued), step, error(saving, durable, committed, requeued)
FROM commits ORDER BY pid
"""


def _add_functions(events: sqlite3.Connection, timebase: Timebase, gpu: Gpu) -> None:
    """Add the functions of the queries; times are nsys's unless they say so."""

    def known(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: None if None in values else function(*values)

    mono = functools.cache(timebase.mono)

    def error(*moments_ns: int | None) -> int | None:
        errors = (both[1] for ns in moments_ns if ns is not None and (both := mono(ns)))
        return max(errors, default=None)

    events.create_function("pid", 1, _pid)
    events.create_function("nsys", 1, known(timebase.nsys))
    events.create_function("mono", 1, known(lambda ns: (mono(ns) or (None,))[0]))
    events.create_function("error", -1, error)
    events.create_function("last_end", 2, known(lambda pid, ns: gpu.last_end(pid, before_ns=ns)))
    events.create_function(
        "first_start", 2, known(lambda pid, ns: gpu.first_start(pid, since_ns=ns))
    )


# --- nsys's clock ---------------------------------------------------------------------------------
#
# nsys counts from its start, by a clock that drifts from CLOCK_MONOTONIC, which NTP slews, by
# microseconds per second. The job emits marks ``clock`` with the CLOCK_MONOTONIC read just before.
# nsys may stamp a mark late, if the thread was held up in between, but never early: CLOCK_MONOTONIC
# minus nsys's time is never below a mark's value, and of the marks around a moment the largest is
# the best.


class Timebase:
    """The two clocks of one report, common to all its processes."""

    def __init__(self, marks: Sequence[tuple[int, int]]) -> None:
        """``marks``: pairs of nsys's time and CLOCK_MONOTONIC, in any order."""
        ordered = sorted(marks)
        self._times = [nsys_ns for nsys_ns, _ in ordered]
        self._offsets = [mono_ns - nsys_ns for nsys_ns, mono_ns in ordered]
        self._drift = self._measure_drift()
        self._late_ns = self._measure_lateness()

    def mono(self, nsys_ns: int) -> tuple[int, int] | None:
        """Return CLOCK_MONOTONIC at nsys's time, and its error bound.

        None: with fewer than two marks their delay is unknown.
        """
        if len(self._times) < 2:
            return None
        at = bisect.bisect_left(self._times, nsys_ns)
        near = range(max(0, at - _NEIGHBOURS), min(len(self._times), at + _NEIGHBOURS))
        lowest = sorted(
            (self._offsets[i] - self._drift * abs(self._times[i] - nsys_ns), i) for i in near
        )
        (second, _), (first, best) = lowest[-2:]
        away_ns = self._drift * abs(self._times[best] - nsys_ns)
        # the best one is late, too: by about as much as it is earlier than the next best
        late_ns = first - second if self._late_ns is None else min(first - second, self._late_ns)
        return nsys_ns + self._offsets[best], round(away_ns + late_ns) + 1

    def nsys(self, mono_ns: int) -> int | None:
        """Convert in reverse, for bounds."""
        if not self._times:
            return None
        at = bisect.bisect_left(self._times, mono_ns - self._offsets[0])
        return mono_ns - self._offsets[min(at, len(self._times) - 1)]

    def epoch_offset_ns(self, session_epoch_ns: int | None) -> int | None:
        """Return the offset from CLOCK_MONOTONIC to the wall clock, as of nsys's start."""
        start = self.mono(0)
        return None if start is None or session_epoch_ns is None else session_epoch_ns - start[0]

    def _measure_lateness(self) -> float | None:
        """Return a bound that nine of ten marks' differences from a close one stay below."""
        ordered = itertools.pairwise(zip(self._times, self._offsets, strict=True))
        close = sorted(abs(b[1] - a[1]) for a, b in ordered if b[0] - a[0] < _CLOSE_NS)
        return close[len(close) * 9 // 10] if close else None

    def _measure_drift(self) -> float:
        """Return the drift per nanosecond: the steepest between the best marks a second apart."""
        groups: list[tuple[int, int]] = []
        for nsys_ns, offset in zip(self._times, self._offsets, strict=True):
            if groups and nsys_ns - groups[-1][0] < _APART_NS:
                groups[-1] = (groups[-1][0], max(groups[-1][1], offset))
            else:
                groups.append((nsys_ns, offset))
        slopes = [abs((b[1] - a[1]) / (b[0] - a[0])) for a, b in itertools.pairwise(groups)]
        if not slopes:
            return _DRIFT_MAX
        return min(_DRIFT_MAX, max(_DRIFT_MIN, statistics.median(slopes)))
