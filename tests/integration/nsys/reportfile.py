"""A report as nsys 2022.4 exports it: its own tables, filled by hand."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

MARK, PUSH_POP, START_END, CREATE, CATEGORY = 34, 59, 60, 75, 33
SIGNALS = {"SIGTSTP": 20, "SIGCONT": 18, "SIGUSR1": 10, "SIGUSR2": 12, "SIGTERM": 15}
EPOCH_NS = 1_795_340_699_513_320_073

_SCHEMA = """
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE ENUM_NSYS_EVENT_TYPE (id INTEGER NOT NULL PRIMARY KEY, name TEXT, label TEXT);
CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
CREATE TABLE TARGET_INFO_SYSTEM_ENV (
    globalVid INTEGER, devStateName TEXT, name TEXT, nameEnum INTEGER, value TEXT);
CREATE TABLE ANALYSIS_DETAILS (
    globalVid INTEGER, duration INTEGER, startTime INTEGER, stopTime INTEGER);
CREATE TABLE EXPORT_META_DATA (name TEXT, value TEXT);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL,
    uint32Value INTEGER, int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT);
"""
_GPU = """CREATE TABLE {} (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER)"""


class ReportFile:
    """What one host's nsys recorded. Times are nsys's, but for stamps."""

    def __init__(self, path: Path, *, duration_ns: int = 60_000_000_000) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self.connection = sqlite3.connect(path)
        self.connection.executescript(_SCHEMA)
        types = {MARK: "NvtxMark", PUSH_POP: "NvtxPushPopRange", START_END: "NvtxStartEndRange"}
        for number, name in {**types, CREATE: "NvtxDomainCreate", CATEGORY: "NvtxCategory"}.items():
            self.insert("ENUM_NSYS_EVENT_TYPE", number, name, name)
        self.insert("TARGET_INFO_SESSION_START_TIME", EPOCH_NS, "", "")
        self.insert("TARGET_INFO_SYSTEM_ENV", 1, "Local (CLI)", "Hostname", 619, "node7")
        self.insert("ANALYSIS_DETAILS", 1, duration_ns, 0, duration_ns)
        self.insert("EXPORT_META_DATA", "EXPORT_PRODUCT_VERSION", "2022.4.2.1")
        self._strings: dict[str, int] = {}

    def insert(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * len(values))
        self.connection.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def text_id(self, text: str) -> int:
        if text not in self._strings:
            self._strings[text] = len(self._strings) + 1
            self.insert("StringIds", self._strings[text], text)
        return self._strings[text]

    def nvtx(self, **columns: object) -> None:
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        sql = f"INSERT INTO NVTX_EVENTS ({names}) VALUES ({marks})"
        self.connection.execute(sql, tuple(columns.values()))

    def gpu(self, kind: str, *rows: tuple[int, int, int]) -> None:
        """Start, end and globalPid of each; the table is made with its first row, as by nsys."""
        table = f"CUPTI_ACTIVITY_KIND_{kind}"
        found = "SELECT count(*) FROM sqlite_master WHERE name = ?"
        if not self.connection.execute(found, (table,)).fetchone()[0]:
            self.connection.execute(_GPU.format(table))
        self.connection.executemany(f"INSERT INTO {table} VALUES (?, ?, 0, 1, 7, 1, ?)", rows)

    def save(self) -> Path:
        self.connection.commit()
        self.connection.close()
        return self.path


@dataclass
class Process:
    """One rank: what its native gate would emit. ``offset_ns``: CLOCK_MONOTONIC of nsys's 0."""

    report: ReportFile
    pid: int
    offset_ns: int = 5_000_000_000_000
    domain: int = 1
    name: str = "hydroslurm"

    def __post_init__(self) -> None:
        self.global_pid = 281474976710656 | self.pid << 24
        self.report.nvtx(
            start=0, eventType=CREATE, text=self.name, globalTid=self.tid(), domainId=self.domain
        )

    def tid(self, thread: int = 0) -> int:
        return self.global_pid | (self.pid + thread)

    def mono(self, nsys_ns: int) -> int:
        return nsys_ns + self.offset_ns

    def _nvtx(self, name: str, payload: int, thread: int, **columns: object) -> None:
        place = {"globalTid": self.tid(thread), "domainId": self.domain, "uint64Value": payload}
        self.report.nvtx(textId=self.report.text_id(name), **place, **columns)

    def mark(self, name: str, at_ns: int, payload: int, *, category: int | None = None) -> None:
        self._nvtx(name, payload, 1, start=at_ns, eventType=MARK, category=category)

    def clock(self, at_ns: int, *, late_ns: int = 0) -> None:
        self.mark("clock", at_ns + late_ns, self.mono(at_ns))

    def request(
        self, name: str, at_ns: int, signal: str | None, *, noticed_ns: int = 20_000
    ) -> int:
        """Returns the stamp."""
        self.clock(at_ns + noticed_ns)
        number = SIGNALS[signal] if signal else 0
        self.mark(name, at_ns + noticed_ns, self.mono(at_ns), category=number)
        return self.mono(at_ns)

    def range(
        self, name: str, begin_ns: int, end_ns: int | None, payload: int, *, thread: int = 1
    ) -> None:
        kind = PUSH_POP if name == "parked" else START_END
        self._nvtx(name, payload, thread, start=begin_ns, end=end_ns, eventType=kind)

    def pause(self, number: int, at_ns: int, *, until_ns: int, signals: tuple[str, str]) -> None:
        """Two threads park 200 and 300 us after the request and run 40 and 60 us after the next."""
        self.request("pause_request", at_ns, signals[0])
        self.range("pausing", at_ns + 30_000, at_ns + 310_000, number)
        self.mark("gate_closed", at_ns + 31_000, self.mono(at_ns))
        self.mark("at_rest", at_ns + 311_000, self.mono(at_ns + 300_000))
        self.clock(at_ns + 300_000, late_ns=1000)
        self.range("parked", at_ns + 200_000, until_ns + 40_000, number, thread=0)
        self.range("parked", at_ns + 300_000, until_ns + 60_000, number, thread=5)
        self.request("resume_request", until_ns, signals[1])
        self.range("resuming", until_ns + 30_000, until_ns + 70_000, number)
        self.mark("gate_opened", until_ns + 31_000, self.mono(until_ns))
