"""One report of nsys: its pauses and stops in the job's own clock, and how they are shown.

nsys itself exports a report to SQLite, and makes a table when it has its first row: on a machine
without a GPU there is none of kernels. Its user guide has the schema ("SQLite Schema Reference");
seen here are schema 3.0.0 of nsys 2022.4 and what later ones have added. What each mark of
hydroslurm means is written in ``hydroslurm/gate/native/marks.h``.

Every timestamp of a :class:`Profile` is CLOCK_MONOTONIC of the profiled host, as in the event log.
A pause here and one in the log are the same when ``pid`` and ``requested_mono_ns`` are equal, to
the nanosecond: the NVTX mark carries the signal handler's own timestamp. What nsys timed itself is
accurate to ``error_ns``.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math
import os
import shutil
import sqlite3
import stat
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
"""Event types, where the report does not name them."""
_TID_BITS = 24
"""globalTid = ... pid << 24 | tid; globalPid the same with a tid of 0."""
_LOW = (1 << _TID_BITS) - 1
TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": "kernels",
    "CUPTI_ACTIVITY_KIND_MEMCPY": "copies",
    "CUPTI_ACTIVITY_KIND_MEMSET": "memsets",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": "graphs",
}
"""The last: graphs as a whole. Traced node by node they stand among the kernels."""
BLOCK = 8192
"""Rows that SQLite summarizes together."""
EXPORT_TIMEOUT_S = 1800
"""Minutes are usual for a report of gigabytes."""
REPORT_SUFFIX, SQLITE_SUFFIX, _RAW_SUFFIX = ".nsys-rep", ".sqlite", ".qdstrm"

_NEIGHBOURS = 8
"""Marks on each side that are looked at."""
_DRIFT_MAX, _DRIFT_MIN = 500e-6, 10e-6
"""The first is what the kernel slews CLOCK_MONOTONIC by at most."""
_CLOSE_NS = 10_000_000
"""Closer marks measure each other's delay; the drift is no more than 5 us in this time."""
_APART_NS = 1_000_000_000
"""Marks further apart than this measure the drift."""


@dataclass(frozen=True)
class ProfiledPause:
    """One pause of one process. None: the report does not hold it."""

    pid: int
    tid: int | None
    """The thread that was parked last; None when no thread had to be held."""
    number: int | None
    """Of the pause, counted in its process."""
    signal: int
    """0: asked for by the program or by another rank."""
    requested_mono_ns: int | None
    """When the signal handler ran."""
    parked_mono_ns: int | None
    """When the last thread was put to sleep."""
    drained_mono_ns: int | None
    """When the accelerator had finished what was launched before."""
    last_kernel_end_mono_ns: int | None
    """End of the last kernel, copy or memset of before; earlier than the request where the device
    was idle by then."""
    resume_requested_mono_ns: int | None
    """None also where a stop ended the pause."""
    running_mono_ns: int | None
    """When the first thread ran again."""
    first_kernel_mono_ns: int | None
    """Start of the first kernel, copy or memset after that."""
    error_ns: int | None
    """What the moments that nsys timed may be wrong by; None: the clocks could not be joined."""


@dataclass(frozen=True)
class ProfiledStop:
    """One stop of one process. None: the report does not hold it."""

    pid: int
    signal: int
    """0: asked for by the program or by another rank."""
    requested_mono_ns: int | None
    saving_mono_ns: int | None
    """When the snapshot began."""
    durable_mono_ns: int | None
    """When its parts were on disk, or the save had failed."""
    committed_mono_ns: int | None
    requeued_mono_ns: int | None
    """When Slurm had answered."""
    step: int | None
    """That was saved."""
    error_ns: int | None
    """What the moments that nsys timed may be wrong by; None: the clocks could not be joined."""


@dataclass(frozen=True)
class Profile:
    """One nsys report."""

    path: Path
    host: str | None
    session_epoch_ns: int | None
    """Wall clock of the moment that nsys counts from."""
    pids: tuple[int, ...]
    """Processes with marks of hydroslurm."""
    pauses: tuple[ProfiledPause, ...]
    """By process, then in order."""
    stops: tuple[ProfiledStop, ...]
    """By process."""
    alignment_error_ns: int | None
    """The largest ``error_ns`` of the above."""
    missing: tuple[str, ...]
    """What the report does not hold and a reader would look for; plain sentences."""
    epoch_offset_ns: int | None
    """Added to CLOCK_MONOTONIC it gives the wall clock, as it was when nsys began."""
    version: str | None
    """Of the nsys that wrote it."""


def read_profile(path: Path) -> Profile:
    """Read ``*.nsys-rep`` or ``*.sqlite``. A cut-off file is read as far as it goes.

    An ``.nsys-rep`` is turned into SQLite first, which stays beside it where that can be written.

    Raises:
        NsysMissing: the report has to be exported, and there is no ``nsys`` here.
        ProfileError: not a report of nsys, or nothing of it can be read.
    """
    with as_sqlite(path) as exported, open_database(exported) as database:
        processes, clocks = read_marks(database)
        timebase = Timebase(clocks)
        gpu = Gpu(database, (one.global_pid for one in processes if one.marks["pause_request"]))
        pauses = [pause for one in processes for pause in pauses_of(one, timebase, gpu)]
        stops = [stop for one in processes for stop in stops_of(one, timebase)]
        stated = [one.error_ns for one in pauses] + [one.error_ns for one in stops]
        epoch_ns = database.integer("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        versions = (
            database.text(table, "EXPORT_PRODUCT_VERSION")
            for table in ("EXPORT_META_DATA", "META_DATA_EXPORT")
        )
        return Profile(
            path=path,
            host=database.text("TARGET_INFO_SYSTEM_ENV", "Hostname"),
            session_epoch_ns=epoch_ns,
            pids=tuple(one.pid for one in processes),
            pauses=tuple(pauses),
            stops=tuple(stops),
            alignment_error_ns=max(
                (error_ns for error_ns in stated if error_ns is not None), default=None
            ),
            missing=(*database.missing, *_absent(processes, clocks, gpu)),
            epoch_offset_ns=timebase.epoch_offset_ns(epoch_ns),
            version=next((value for value in versions if value is not None), None),
        )


def _absent(processes: Sequence[ProcessMarks], clocks: Sequence[object], gpu: Gpu) -> Iterator[str]:
    timed = any(several for one in processes for several in one.ranges.values())
    if timed and len(clocks) < 2:
        yield (
            f"{len(clocks)} `clock` mark(s) where two are needed: what nsys timed itself "
            "cannot be converted to the clock of the event log"
        )
    idle = [str(one.pid) for one in processes if not gpu.worked_for(one.global_pid)]
    if processes and len(idle) == len(processes):
        yield "no kernels, copies or memsets: profiled without --trace=cuda, or no GPU was used"
    elif idle:
        yield f"no kernels, copies or memsets of process {', '.join(idle)}"


# --- one report alone, for a terminal and as JSON ------------------------------------------------

_US, _MS, _S = 1e3, 1e6, 1e9


class _Latency(NamedTuple):
    """From one moment of a pause or stop to another, in JSON by its key and as a column."""

    key: str
    begin: str
    end: str
    heading: str
    unit_ns: float
    spec: str
    optional: bool = False

    def between(self, one: object) -> int | None:
        begin_ns, end_ns = (getattr(one, f"{name}_mono_ns") for name in (self.begin, self.end))
        return None if begin_ns is None or end_ns is None else end_ns - begin_ns

    @property
    def column(self) -> Column:
        return Column(
            self.heading,
            lambda one: number(self.between(one), self.spec, self.unit_ns),
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
    """All of it for JSON: moments as they are, latencies as ``*_ns``; null where not known."""

    def rows(found: Iterable[object], latencies: Sequence[_Latency]) -> list[dict[str, Any]]:
        return [{**vars(one), **{of.key: of.between(one) for of in latencies}} for one in found]

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
    """A table of pauses and one of stops, where there are any."""
    tables = (
        ("pause", "number", _OF_PAUSES, profile.pauses),
        ("step", "step", _OF_STOPS, profile.stops),
    )
    return [
        table_of(
            "",
            [
                Column("process", lambda one: str(one.pid)),
                Column(counted, lambda one, key=key: number(getattr(one, key), "d")),  # type: ignore[misc]
                # 0 was asked for by the program or by another rank
                Column("signal", lambda one: signal_name(one.signal) if one.signal else "none",
                       left=True),
                *(latency.column for latency in latencies),
                Column("error\n\n(±µs)", lambda one: number(one.error_ns, ",.1f", _US)),
            ],
            records[:most],
            left_out=max(0, len(records) - most),
        )
        for counted, key, latencies, records in tables
        if records
    ]  # fmt: skip


def profile_sentences(profile: Profile) -> list[str]:
    """What stands below the tables: the error of the clocks, and what is missing."""
    said = []
    if profile.pids and not profile.pauses and not profile.stops:
        said.append("Nothing was paused or stopped while nsys recorded.")
    if profile.alignment_error_ns is not None:
        said.append(
            "nsys's clock is joined to CLOCK_MONOTONIC, the clock of the event log, to within "
            f"{profile.alignment_error_ns / _US:,.1f} µs; requests carry the stamp of the "
            "signal's handler and have no such error."
        )
    return [*said, *(f"Missing: {sentence}." for sentence in profile.missing)]


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
    """The program: of PATH, else beside this Python, where setup.sh puts it."""
    return shutil.which("nsys") or shutil.which("nsys", path=str(Path(sys.executable).parent))


def profiles_in(folder: Path) -> tuple[Path, ...]:
    """The reports in a folder, by name; of one that was exported already only the report."""
    found = {}
    for suffix in (SQLITE_SUFFIX, REPORT_SUFFIX):
        for path in folder.glob(f"*{suffix}"):
            found[path.name.removesuffix(suffix)] = path
    return tuple(path for _, path in sorted(found.items()))


@contextlib.contextmanager
def as_sqlite(path: Path) -> Iterator[Path]:
    """``path`` itself, or what it is exported to: beside it where that can be written, else in a
    temporary folder that is gone afterwards. An export that is newer than its report is used again,
    if nobody could have made it who could not have written the report.

    Raises:
        NsysMissing: it has to be exported, and there is no ``nsys``.
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
        made = Path(folder, beside.name)
        _export(nsys, path, made)
        with contextlib.suppress(OSError):
            made = made.replace(beside) if made.parent.parent == path.parent else made
        yield made


def _is_as_good_as(report: Path, beside: Path) -> bool:
    """Whether an export can be believed as far as its report: it lies in the same folder, so that
    only its owner and its mode can make a difference."""
    status = beside.lstat()
    owners = {os.getuid(), 0, report.stat().st_uid}
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != report.stat().st_gid else 0)
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & others


def _export(nsys: str, report: Path, made: Path) -> None:
    """Raises ProfileError: with what nsys said."""
    argv = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true"]
    try:
        done = subprocess.run(
            [*argv, "--output", str(made), str(report)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=EXPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"{report}: nsys could not export it: {error}") from None
    if done.returncode != 0 or not made.is_file():
        said = [line for line in done.stdout.replace("\r", "\n").splitlines() if line.strip()]
        raise ProfileError(
            f"{report}: `{nsys} export` ended with {done.returncode}: "
            f"{' '.join(said[-3:]) or 'it said nothing'}; a report that was cut off, or of a newer "
            "nsys, has to be exported by the nsys that wrote it"
        )


# --- the file ------------------------------------------------------------------------------------


class Database:
    """One report, read-only, which may be hostile: only tables are read, never a view or a
    column that is computed. What cannot be read is named in ``missing`` and read as nothing."""

    def __init__(
        self, connection: sqlite3.Connection, tables: frozenset[str], *, size_bytes: int
    ) -> None:
        self._tables = tables
        self.size_bytes = size_bytes
        self.missing: list[str] = []
        self._connection = connection

    def columns(self, table: str) -> frozenset[str]:
        """Of a table; none when there is no such table."""
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
        """All rows, or those before the place where the file is torn; ``what`` names them then.

        Args:
            integers: number of the columns that hold one; a row with anything else there is none.
            if_any: of those that hold one or nothing.
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
        """Those of the names that the report holds, by id."""
        if not self.columns("StringIds"):
            return {}
        sql = f"SELECT id, value FROM StringIds WHERE value IN ({', '.join('?' * len(names))})"
        return dict(self.rows(sql, names, what="names", integers=(0,)))

    def event_type(self, name: str, number: int) -> int:
        """The number of an event type: by name where the report names them."""
        known = self._first("ENUM_NSYS_EVENT_TYPE", "id", f"name = '{name}'")
        return known if type(known) is int else number

    def text(self, table: str, name: str) -> str | None:
        """The value of a name in a table of names and values."""
        value = self._first(table, "value", f"name = '{name}'")
        return None if value is None else clean(str(value))

    def integer(self, table: str, column: str) -> int | None:
        """Of the first row of a table."""
        value = self._first(table, column, "true")
        return value if type(value) is int else None

    def _first(self, table: str, column: str, where: str) -> Any:
        sql = f"SELECT {column} FROM {table} WHERE {where}"
        rows = self.rows(sql, what=table) if self.columns(table) else iter(())
        return next(rows, (None,))[0]


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
        yield Database(connection, tables, size_bytes=path.stat().st_size)


class _Block(NamedTuple):
    """One process's rows among :data:`BLOCK` that lie together."""

    table: str
    first_row: int
    first_start_ns: int
    last_start_ns: int
    last_end_ns: int


class Gpu:
    """When the device worked for each process: kernels, copies, memsets and graphs. Times are
    nsys's.

    A report has millions of them. SQLite reads them once for each process, block by block, as they
    lie in the file, which is nearly in the order of time; a moment then costs a look at the few
    blocks that it lies in. Reading them into Python, or sorting them, would take ten times as long.
    """

    def __init__(self, database: Database, global_pids: Iterable[int]) -> None:
        self._database = database
        tables = [t for t in TABLES if {"start", "end", "globalPid"} <= database.columns(t)]
        self._blocks = {
            one: [block for table in tables for block in _blocks(database, table, one)]
            for one in global_pids
        }

    def worked_for(self, global_pid: int) -> bool:
        """Whether the process used a device."""
        return bool(self._blocks.get(global_pid))

    def last_end(self, global_pid: int, *, before_ns: int) -> int | None:
        """When the last of what started before a moment had ended, which may be after it."""
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
        found: int | None = next(rows, (None,))[0]
        return found


_OF_BLOCK = "rowid BETWEEN ? AND ? AND globalPid = ?"


def _blocks(database: Database, table: str, global_pid: int) -> Iterator[_Block]:
    what = TABLES[table]
    # not MIN and MAX in one question, for which SQLite would read the whole table
    sql = f"SELECT (SELECT MIN(rowid) FROM {table}), (SELECT MAX(rowid) FROM {table})"
    first, last = next(database.rows(sql, what=what), (None, None))
    if first is None or last - first > database.size_bytes:  # no table has rows without bytes
        return
    sql = f"SELECT MIN(start), MAX(start), MAX(end) FROM {table} WHERE {_OF_BLOCK}"
    for row in range(first, last + 1, BLOCK):
        values = (row, row + BLOCK - 1, global_pid)
        for found in database.rows(sql, values, what=what, integers=(0, 1, 2)):
            yield _Block(table, row, *found)


# --- the marks and ranges of the domain hydroslurm ----------------------------------------------


@dataclass(frozen=True)
class Mark:
    """A request or a moment: the watcher emitted it at ``nsys_ns``; the stamp is the handler's, or
    that of the event log. ``signal``: of a request."""

    nsys_ns: int
    stamp_mono_ns: int
    signal: int = 0


@dataclass(frozen=True)
class Range:
    """``payload``: number of the pause, or step. ``end_ns`` is None when it never ended."""

    begin_ns: int
    end_ns: int | None
    payload: int
    tid: int


@dataclass
class ProcessMarks:
    """What one process emitted, each in the order of nsys's time."""

    pid: int
    global_pid: int
    """What its kernels carry."""
    marks: defaultdict[str, list[Mark]] = field(default_factory=lambda: defaultdict(list))
    ranges: defaultdict[str, list[Range]] = field(default_factory=lambda: defaultdict(list))


def read_marks(database: Database) -> tuple[list[ProcessMarks], list[tuple[int, int]]]:
    """What each process emitted, by pid; and the marks ``clock`` of all of them, which have both
    clocks in common: nsys's time, and CLOCK_MONOTONIC read just before. Without any process the
    database's ``missing`` says why."""
    domains = _domains(database)
    processes = {one: ProcessMarks(one >> _TID_BITS & _LOW, one) for one, _ in domains}
    clocks: list[tuple[int, int]] = []
    if not domains:
        return [], clocks
    ids = database.string_ids([CLOCK, *REQUESTS, *MOMENTS, *RANGES])
    mark = database.event_type("NvtxMark", _MARK)
    last_ns = database.integer("ANALYSIS_DETAILS", "duration")
    category = "category" if "category" in database.columns("NVTX_EVENTS") else "0"
    # by id, so that millions of rows of operators are passed over without reading their text
    sql = (
        f"SELECT start, end, eventType, {category}, globalTid, textId, domainId, uint64Value "
        f"FROM NVTX_EVENTS WHERE textId IN ({', '.join('?' * len(ids))}) "
        "AND uint64Value IS NOT NULL"
    )
    rows = database.rows(
        sql, list(ids), what="NVTX events", integers=(0, 2, 4, 5, 6, 7), if_any=(1, 3)
    )
    for start, end, kind, signal, global_tid, text_id, domain, payload in sorted(
        rows, key=lambda row: row[0]
    ):
        name, global_pid = ids[text_id], global_tid & ~_LOW
        if (global_pid, domain) not in domains:
            continue
        process = processes[global_pid]
        if kind != mark and name in RANGES:
            # nsys ends what was not ended with its recording
            end_ns = None if end == last_ns else end
            process.ranges[name].append(Range(start, end_ns, payload, global_tid & _LOW))
        elif kind == mark and name == CLOCK:
            clocks.append((start, payload))
        elif kind == mark:
            process.marks[name].append(
                Mark(start, payload, (signal or 0) if name in REQUESTS else 0)
            )
    return sorted(processes.values(), key=lambda one: one.pid), clocks


def _domains(database: Database) -> set[tuple[int, int]]:
    """Process and number of its domain: each process counts its domains for itself. Where there is
    none to be read, ``missing`` says why."""
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


class _Converter:
    """nsys's moments in CLOCK_MONOTONIC, and the worst error among them."""

    def __init__(self, timebase: Timebase) -> None:
        self._timebase = timebase
        self.error_ns: int | None = None

    def mono(self, nsys_ns: int | None) -> int | None:
        found = None if nsys_ns is None else self._timebase.mono(nsys_ns)
        if found is None:
            return None
        self.error_ns = max(found[1], self.error_ns or 0)
        return found[0]


@dataclass(frozen=True)
class _Between:
    """One pause in nsys's time, with what was emitted for it."""

    number: int | None
    asked: Mark | None
    at_rest: Mark | None = None
    resumed: Mark | None = None
    ranges: Mapping[str, list[Range]] = field(default_factory=lambda: defaultdict(list))


def pauses_of(marks: ProcessMarks, timebase: Timebase, gpu: Gpu) -> list[ProfiledPause]:
    """In order. A request that closed no gate makes none, unless the recording ends with it."""
    return [_profiled(marks, pause, timebase, gpu) for pause in _pauses(marks)]


def stops_of(marks: ProcessMarks, timebase: Timebase) -> list[ProfiledStop]:
    """At most one: a process ends with its stop. What it saves before is no part of one."""
    requests, requeueing = marks.marks["stop_request"], marks.ranges["requeueing"]
    if not requests and not requeueing:
        return []
    first = requests[0] if requests else None
    # a save that was under way is waited for, or the state is saved anew: the last one counts
    since_ns = first.nsys_ns if first else 0
    saving = _last(r for r in marks.ranges["saving"] if r.end_ns is None or r.end_ns >= since_ns)
    committing = _last(
        r
        for r in marks.ranges["committing"]
        if saving and r.payload == saving.payload and r.begin_ns >= saving.begin_ns
    )
    requeued = _last(r for r in requeueing if r.begin_ns >= since_ns)
    convert = _Converter(timebase)
    return [
        ProfiledStop(
            pid=marks.pid,
            signal=first.signal if first else 0,
            requested_mono_ns=first.stamp_mono_ns if first else None,
            saving_mono_ns=convert.mono(saving.begin_ns if saving else None),
            durable_mono_ns=convert.mono(saving.end_ns if saving else None),
            committed_mono_ns=convert.mono(committing.end_ns if committing else None),
            requeued_mono_ns=convert.mono(requeued.end_ns if requeued else None),
            step=saving.payload if saving else None,
            error_ns=convert.error_ns,
        )
    ]


def _last(ranges: Iterable[Range]) -> Range | None:
    return next(reversed(list(ranges)), None)


def _pauses(marks: ProcessMarks) -> list[_Between]:
    by_number: dict[int, defaultdict[str, list[Range]]] = {}
    for name in ("pausing", "parked", "resuming", "draining"):
        for one in marks.ranges[name]:
            by_number.setdefault(one.payload, defaultdict(list))[name].append(one)
    # a stop opens the gate, and is no resume
    stops = {stop.stamp_mono_ns for stop in marks.marks["stop_request"]}
    pauses: list[_Between] = []
    since_ns = 0
    ordered = sorted(by_number.items())
    begins_ns = [_begin(ranges) for _, ranges in ordered]
    ends_ns = [*begins_ns[1:], math.inf]
    for (which, ranges), begin_ns, end_ns in zip(ordered, begins_ns, ends_ns, strict=False):
        closed, at_rest, opened = (
            [mark for mark in marks.marks[name] if begin_ns <= mark.nsys_ns < end_ns]
            for name in MOMENTS
        )
        asked = _request_of(closed[0], marks.marks["pause_request"]) if closed else None
        resumed = None
        if opened and opened[0].stamp_mono_ns not in stops:
            resumed = _request_of(opened[0], marks.marks["resume_request"])
        last = at_rest[-1] if at_rest else None
        pauses.append(_Between(which, asked, last, resumed, ranges))
        since_ns = resumed.nsys_ns if resumed else begin_ns
    if not pauses or pauses[-1].resumed:
        # the recording ends before the gate had closed
        asked_since = (one for one in marks.marks["pause_request"] if one.nsys_ns > since_ns)
        pauses += [_Between(None, one) for one in asked_since]
    return pauses


def _begin(ranges: Mapping[str, list[Range]]) -> int:
    """When the gate was closing: a thread may be held before the watcher emits ``pausing``."""
    if ranges["pausing"]:
        return ranges["pausing"][0].begin_ns
    return min(one.begin_ns for several in ranges.values() for one in several)


def _request_of(moment: Mark, requests: list[Mark]) -> Mark:
    """That with its stamp; a gate that is stopped opens by none."""
    found = (one for one in requests if one.stamp_mono_ns == moment.stamp_mono_ns)
    return next(found, moment)


def _profiled(marks: ProcessMarks, pause: _Between, timebase: Timebase, gpu: Gpu) -> ProfiledPause:
    convert = _Converter(timebase)
    parked_ns, tid = _parked(pause)
    running_ns = _running(pause, timebase)
    drained_ns = pause.ranges["draining"][-1].end_ns if pause.ranges["draining"] else None
    # what is vacated is copied after the drain, and what comes back is copied before threads run
    idle_ns = drained_ns if drained_ns is not None else running_ns
    last_end_ns = None
    if parked_ns is not None:
        before_ns = idle_ns if idle_ns is not None else parked_ns
        last_end_ns = gpu.last_end(marks.global_pid, before_ns=before_ns)
    first_ns = None
    if running_ns is not None:
        first_ns = gpu.first_start(marks.global_pid, since_ns=running_ns)
    return ProfiledPause(
        pid=marks.pid,
        tid=tid,
        number=pause.number,
        signal=pause.asked.signal if pause.asked else 0,
        requested_mono_ns=pause.asked.stamp_mono_ns if pause.asked else None,
        parked_mono_ns=_rest_of_quiet(pause, tid) or convert.mono(parked_ns),
        drained_mono_ns=convert.mono(drained_ns),
        last_kernel_end_mono_ns=convert.mono(last_end_ns),
        resume_requested_mono_ns=pause.resumed.stamp_mono_ns if pause.resumed else None,
        running_mono_ns=convert.mono(running_ns),
        first_kernel_mono_ns=convert.mono(first_ns),
        error_ns=convert.error_ns,
    )


def _parked(pause: _Between) -> tuple[int | None, int | None]:
    """When the last thread came to rest, and which. A thread that comes to the gate later, while
    all others are held, delays nothing."""
    ended_ns = pause.ranges["pausing"][-1].end_ns if pause.ranges["pausing"] else None
    if pause.ranges["pausing"] and ended_ns is None:
        return None, None
    held = [r for r in pause.ranges["parked"] if ended_ns is None or r.begin_ns <= ended_ns]
    if not held:
        return ended_ns, None
    last = max(held, key=lambda r: r.begin_ns)
    return last.begin_ns, last.tid


def _rest_of_quiet(pause: _Between, tid: int | None) -> int | None:
    """Where no thread was held: the stamp that the gate took at the first of two looks. The range
    ends with the second."""
    return pause.at_rest.stamp_mono_ns if tid is None and pause.at_rest is not None else None


def _running(pause: _Between, timebase: Timebase) -> int | None:
    """When the first thread ran again. It may do so before ``resuming`` is emitted: handlers open
    the gate. A thread that was let through for a collective before is not meant."""
    since_ns = pause.ranges["resuming"][-1].begin_ns if pause.ranges["resuming"] else None
    if pause.resumed is not None:
        stamp_ns = timebase.nsys(pause.resumed.stamp_mono_ns)
        since_ns = min(x for x in (stamp_ns, since_ns) if x is not None) if stamp_ns else since_ns
    if since_ns is None:
        return None
    ends = [
        r.end_ns for r in pause.ranges["parked"] if r.end_ns is not None and r.end_ns >= since_ns
    ]
    if ends:
        return min(ends)
    return pause.ranges["resuming"][-1].end_ns if pause.ranges["resuming"] else None


# --- nsys's clock ---------------------------------------------------------------------------------
#
# nsys counts from the start of its recording, by a clock of its own: beside CLOCK_MONOTONIC, which
# NTP slews, it drifts by microseconds in a second. The job emits marks ``clock`` whose payload is
# CLOCK_MONOTONIC, read just before. nsys stamps such a mark late, by as long as the thread was held
# up in between, and never early: so CLOCK_MONOTONIC minus nsys's time is never below what a mark
# says, and of the marks around a moment the one that says most is the best.


class Timebase:
    """The two clocks of one report, which all its processes share."""

    def __init__(self, marks: Sequence[tuple[int, int]]) -> None:
        """``marks``: nsys's time and the CLOCK_MONOTONIC of each, in any order."""
        ordered = sorted(marks)
        self._times = [nsys_ns for nsys_ns, _ in ordered]
        self._offsets = [mono_ns - nsys_ns for nsys_ns, mono_ns in ordered]
        self._drift = self._measure_drift()
        self._late_ns = self._measure_lateness()

    def mono(self, nsys_ns: int) -> tuple[int, int] | None:
        """CLOCK_MONOTONIC at a moment of nsys's time, and what it may be wrong by.

        None: there are fewer than two marks, so that nothing says how late they are.
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
        # the best one is late too, by about as much as it is earlier than the next best
        late_ns = first - second if self._late_ns is None else min(first - second, self._late_ns)
        return nsys_ns + self._offsets[best], round(away_ns + late_ns) + 1

    def nsys(self, mono_ns: int) -> int | None:
        """The reverse of :meth:`mono`, for bounds."""
        if not self._times:
            return None
        at = bisect.bisect_left(self._times, mono_ns - self._offsets[0])
        return mono_ns - self._offsets[min(at, len(self._times) - 1)]

    def epoch_offset_ns(self, session_epoch_ns: int | None) -> int | None:
        """What makes a wall clock of CLOCK_MONOTONIC, as both were when nsys began."""
        start = self.mono(0)
        return None if start is None or session_epoch_ns is None else session_epoch_ns - start[0]

    def _measure_lateness(self) -> float | None:
        """What nine of ten marks differ by from one that is close in time."""
        ordered = itertools.pairwise(zip(self._times, self._offsets, strict=True))
        close = sorted(abs(b[1] - a[1]) for a, b in ordered if b[0] - a[0] < _CLOSE_NS)
        return close[len(close) * 9 // 10] if close else None

    def _measure_drift(self) -> float:
        """Per nanosecond: the steepest between the best marks of groups a second apart."""
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
