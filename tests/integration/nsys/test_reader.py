"""Reports of nsys as they are, old, torn or foreign: what is read, and what is said to be missing.
The tables are made by hand in nsys 2022.4's schema, for no machine of CI has a GPU; what a real
nsys writes is read in test_profiled_jobs.py."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from integration.nsys.reportfile import EPOCH_NS, Process, ReportFile
from rich.console import Console

from hydroslurm.errors import NsysMissing, ProfileError
from hydroslurm.report.nsys import (
    BLOCK,
    Timebase,
    find_nsys,
    profile_figures,
    profiles_in,
    read_profile,
)
from hydroslurm.report.views import profile_view

MS, S = 1_000_000, 1_000_000_000
SUSPEND = ("SIGTSTP", "SIGCONT")
PERSON = ("SIGUSR1", "SIGUSR2")


@pytest.fixture
def report(tmp_path: Path) -> ReportFile:
    return ReportFile(tmp_path / "rank-0-restart-0.sqlite")


@pytest.fixture
def rank(report: ReportFile) -> Process:
    rank = Process(report, 4711)
    rank.clock(1 * MS)
    return rank


def near(value: int | None, wanted: int, error_ns: int | None) -> bool:
    return value is not None and error_ns is not None and abs(value - wanted) <= error_ns


def test_pauses_of_several_processes_are_told_in_the_clock_of_the_event_log(
    report: ReportFile, rank: Process
) -> None:
    """Requests are the handlers' stamps; the rest is right within the error that is stated."""
    other = Process(report, 4712, domain=3)
    rank.pause(1, 10 * MS, until_ns=500 * MS, signals=SUSPEND)
    rank.pause(2, 900 * MS, until_ns=2 * S, signals=PERSON)
    other.pause(1, 11 * MS, until_ns=502 * MS, signals=SUSPEND)
    foreign = Process(report, 4712, domain=1, name="NCCL")
    foreign.pause(9, 20 * MS, until_ns=30 * MS, signals=SUSPEND)
    profile = read_profile(report.save())
    assert (profile.host, profile.session_epoch_ns) == ("node7", EPOCH_NS)
    assert profile.pids == (4711, 4712)
    told = [(p.pid, p.number, p.signal, p.requested_mono_ns) for p in profile.pauses]
    requested = (rank.mono(10 * MS), rank.mono(900 * MS), rank.mono(11 * MS))
    assert told == [
        (4711, 1, 20, requested[0]), (4711, 2, 10, requested[1]), (4712, 1, 20, requested[2]),
    ]  # fmt: skip
    first = profile.pauses[0]
    assert first.tid == rank.pid + 5
    assert near(first.parked_mono_ns, rank.mono(10 * MS + 300_000), first.error_ns)
    assert first.resume_requested_mono_ns == rank.mono(500 * MS)
    assert near(first.running_mono_ns, rank.mono(500 * MS + 40_000), first.error_ns)
    assert profile.alignment_error_ns == max(p.error_ns or 0 for p in profile.pauses) < MS
    assert abs(rank.mono(0) + (profile.epoch_offset_ns or 0) - EPOCH_NS) < MS


def test_a_stop_is_told_with_the_save_that_it_led_to(report: ReportFile, rank: Process) -> None:
    """Saves of before are no part of it; two SIGTERMs are one stop; what nsys ended is unended."""
    rank.range("saving", 5 * MS, 9 * MS, 100)
    rank.range("committing", 8 * MS, 9 * MS, 100)
    asked = rank.request("stop_request", 20 * MS, "SIGTERM")
    rank.request("stop_request", 21 * MS, "SIGTERM")
    rank.range("saving", 30 * MS, 50 * MS, 123)
    rank.range("committing", 49 * MS, 52 * MS, 123)
    rank.range("requeueing", 55 * MS, 60 * S, 123)  # to the end of the recording: never ended
    (stop,) = read_profile(report.save()).stops
    assert (stop.requested_mono_ns, stop.signal, stop.step) == (asked, 15, 123)
    moments = (stop.saving_mono_ns, stop.durable_mono_ns, stop.committed_mono_ns)
    for moment, at_ms in zip(moments, (30, 50, 52), strict=True):
        assert near(moment, rank.mono(at_ms * MS), stop.error_ns)
    assert stop.requeued_mono_ns is None


def test_kernels_around_a_pause(report: ReportFile, rank: Process) -> None:
    """The last that ended after the request and the first of after the resume, of this process;
    what vacating copies between is neither."""
    rank.pause(1, 100 * MS, until_ns=400 * MS, signals=SUSPEND)
    rank.range("draining", 101 * MS, 140 * MS, 1)
    mine, others = rank.global_pid, rank.global_pid + (1 << 24)
    steps = [(i * 10_000, i * 10_000 + 9_000, mine) for i in range(10_000)]  # up to the request
    report.gpu("KERNEL", *steps, (100 * MS, 139 * MS, mine), (150 * MS, 155 * MS, others))
    report.gpu("MEMCPY", (160 * MS, 170 * MS, mine), (390 * MS, 399 * MS, mine))
    again = [(401 * MS + i * 10_000, 401 * MS + i * 10_000 + 9_000, mine) for i in range(2 * BLOCK)]
    report.gpu("KERNEL", *again)
    report.gpu("MEMSET", (400 * MS + 90_000, 400 * MS + 95_000, mine))
    profile = read_profile(report.save())
    (pause,) = profile.pauses
    assert near(pause.last_kernel_end_mono_ns, rank.mono(139 * MS), pause.error_ns)
    assert near(pause.drained_mono_ns, rank.mono(140 * MS), pause.error_ns)
    assert near(pause.first_kernel_mono_ns, rank.mono(400 * MS + 90_000), pause.error_ns)
    assert profile.missing == ()


def test_the_request_of_a_pause_is_the_one_that_closed_the_gate(
    report: ReportFile, rank: Process
) -> None:
    """The event log names that one; requests that were taken back, or that came while the gate was
    closed, are others, and a SIGCONT that Slurm sends with a stop ends no person's pause."""
    rank.request("pause_request", 5 * MS, "SIGTSTP", noticed_ns=2 * MS)  # with the next: no gate
    rank.request("resume_request", 6 * MS, "SIGCONT", noticed_ns=MS)
    rank.pause(1, 100 * MS, until_ns=900 * MS, signals=PERSON)
    rank.request("pause_request", 300 * MS, "SIGTSTP")
    rank.request("resume_request", 600 * MS, "SIGCONT")
    asked = rank.request("pause_request", 1000 * MS, "SIGUSR1")
    rank.range("pausing", 1001 * MS, 1004 * MS, 2)
    rank.mark("gate_closed", 1001 * MS, asked)
    rank.mark("at_rest", 1004 * MS, rank.mono(1002 * MS))
    rank.request("resume_request", 1100 * MS, "SIGCONT")
    stop = rank.request("stop_request", 1101 * MS, "SIGTERM")
    rank.range("resuming", 1102 * MS, 1103 * MS, 2)
    rank.mark("gate_opened", 1102 * MS, stop)
    first, second = read_profile(report.save()).pauses
    assert first.requested_mono_ns == rank.mono(100 * MS)
    assert first.resume_requested_mono_ns == rank.mono(900 * MS)
    assert (second.requested_mono_ns, second.tid) == (asked, None)
    assert second.parked_mono_ns == rank.mono(1002 * MS)  # no thread was held: the gate's stamp
    assert second.resume_requested_mono_ns is None
    assert near(second.running_mono_ns, rank.mono(1103 * MS), second.error_ns)


def test_a_recording_that_ends_in_a_pause_is_told_as_far_as_it_goes(
    report: ReportFile, rank: Process
) -> None:
    """Killed while parked, and right after the request: what did not come is not made up."""
    rank.pause(1, 100 * MS, until_ns=200 * MS, signals=SUSPEND)
    rank.request("pause_request", 300 * MS, "SIGTSTP")
    rank.range("pausing", 301 * MS, 302 * MS, 2)
    rank.range("parked", 301 * MS, None, 2)
    other = Process(report, 5000)
    other.request("pause_request", 300 * MS, "SIGTSTP")
    _, torn, asked = read_profile(report.save()).pauses
    assert near(torn.parked_mono_ns, rank.mono(301 * MS), torn.error_ns)
    assert (torn.resume_requested_mono_ns, torn.running_mono_ns) == (None, None)
    assert (asked.pid, asked.requested_mono_ns) == (5000, other.mono(300 * MS))
    assert (asked.number, asked.parked_mono_ns, asked.error_ns) == (None, None, None)


def test_threads_and_the_watcher_come_in_any_order(report: ReportFile, rank: Process) -> None:
    """A thread is held before `pausing` and runs before `resuming`; one that was let through ran
    before; of two rests the last one counts; a pause that was not over had not parked."""
    rank.range("parked", 90 * MS, 300 * MS, 1, thread=0)  # let through for a collective
    rank.mark("gate_closed", 95 * MS, rank.request("pause_request", 94 * MS, "SIGUSR1"))
    asked = rank.request("pause_request", 100 * MS, "SIGUSR1")
    rank.range("pausing", 101 * MS, 302 * MS, 1)
    rank.mark("gate_closed", 101 * MS, asked)
    rank.range("parked", 301 * MS, 500 * MS + 10_000, 1, thread=0)
    rank.mark("gate_opened", 501 * MS, rank.request("resume_request", 500 * MS, "SIGUSR2"))
    rank.range("resuming", 501 * MS, 502 * MS, 1)
    rank.range("pausing", 600 * MS, 604 * MS, 2)
    for at_ms in (602, 603):
        rank.mark("at_rest", at_ms * MS, rank.mono(at_ms * MS))
    rank.range("pausing", 700 * MS, None, 3)
    rank.range("parked", 701 * MS, None, 3)
    first, quiet, torn = read_profile(report.save()).pauses
    assert first.requested_mono_ns == asked
    assert near(first.parked_mono_ns, rank.mono(301 * MS), first.error_ns)
    assert near(first.running_mono_ns, rank.mono(500 * MS + 10_000), first.error_ns)
    assert quiet.parked_mono_ns == rank.mono(603 * MS)
    assert (torn.tid, torn.parked_mono_ns) == (None, None)


NO_CLOCKS = "UPDATE StringIds SET value = 'other' WHERE value = 'clock'"


@pytest.mark.parametrize(
    ("statement", "missing", "told"),
    [
        ("", "--trace=cuda", 2),
        ("UPDATE NVTX_EVENTS SET text = 'NCCL'", "no NVTX domain 'hydroslurm'", 0),
        ("DROP TABLE NVTX_EVENTS", "--trace=nvtx", 0),
        (f"DELETE FROM NVTX_EVENTS WHERE textId = 1; {NO_CLOCKS}", "`clock`", 1),
    ],
)
def test_what_a_report_does_not_hold_is_named(
    statement: str, missing: str, told: int, report: ReportFile, rank: Process
) -> None:
    """Kernels, hydroslurm's domain, NVTX as a whole, clocks to align by: without these the request
    is told, and nothing else of the pause."""
    rank.pause(1, 10 * MS, until_ns=20 * MS, signals=SUSPEND)
    report.connection.executescript(statement)
    profile = read_profile(report.save())
    assert missing in profile.missing[0]
    assert profile.host == "node7"
    for pause in profile.pauses:
        moments = (pause.requested_mono_ns, pause.parked_mono_ns)
        assert sum(moment is not None for moment in moments) == told
    assert len(profile.pauses) == (told > 0)


def test_an_older_schema_without_names_of_event_types_is_read(
    report: ReportFile, rank: Process
) -> None:
    """Their numbers have not changed; categories and details may be absent too."""
    rank.pause(1, 10 * MS, until_ns=20 * MS, signals=SUSPEND)
    gone = ("ENUM_NSYS_EVENT_TYPE", "ANALYSIS_DETAILS", "TARGET_INFO_SYSTEM_ENV")
    for table in (*gone, "TARGET_INFO_SESSION_START_TIME"):
        report.connection.execute(f"DROP TABLE {table}")
    report.connection.execute("ALTER TABLE NVTX_EVENTS DROP COLUMN category")
    profile = read_profile(report.save())
    assert (profile.host, profile.session_epoch_ns, profile.epoch_offset_ns) == (None, None, None)
    assert [p.signal for p in profile.pauses] == [0]


def test_a_report_that_is_cut_off_is_read_up_to_there(report: ReportFile, rank: Process) -> None:
    """Half a copy of a file: its kernels are gone, its pauses are told, and both are said."""
    rank.pause(1, 10 * MS, until_ns=20 * MS, signals=SUSPEND)
    report.connection.commit()
    whole = report.path.stat().st_size
    report.gpu("KERNEL", *((i * 100, i * 100 + 90, rank.global_pid) for i in range(60_000)))
    path = report.save()
    with path.open("r+b") as file:
        file.truncate(whole + (path.stat().st_size - whole) // 2)
    profile = read_profile(path)
    assert [p.requested_mono_ns for p in profile.pauses] == [rank.mono(10 * MS)]
    assert any(sentence.startswith("kernels: the file is damaged") for sentence in profile.missing)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.sqlite", b"", "not of nsys: it holds no tables"),
        ("b.sqlite", b"SQLite format 3\0" + b"\0" * 40, "cut off"),
        ("c.sqlite", b"{}\n" * 500, "no SQLite file"),
        ("d.qdstrm", b"", "QdstrmImporter -i d.qdstrm"),
    ],
)
def test_what_is_no_report_is_refused(
    name: str, content: bytes, words: str, tmp_path: Path
) -> None:
    """With what was seen and what was wanted."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ProfileError, match=words):
        read_profile(tmp_path / name)
    with pytest.raises(ProfileError, match="no such file"):
        read_profile(tmp_path / "nowhere.nsys-rep")
    with contextlib.closing(sqlite3.connect(tmp_path / "x.sqlite")) as connection:
        connection.execute("CREATE TABLE birds (name)")
        connection.commit()
    with pytest.raises(ProfileError, match="it holds birds"):
        read_profile(tmp_path / "x.sqlite")


@pytest.mark.parametrize(
    "statement",
    [
        # a question that has no end, in the place of a table
        "DROP TABLE NVTX_EVENTS; CREATE VIEW NVTX_EVENTS AS WITH RECURSIVE t(n) AS (SELECT 1 UNION "
        "ALL SELECT n + 1 FROM t) SELECT n AS start, n AS end, n AS eventType, n AS globalTid, "
        "n AS textId, n AS domainId, n AS uint64Value FROM t",
        "UPDATE NVTX_EVENTS SET start = 'x', end = 1e999",
        "UPDATE NVTX_EVENTS SET start = NULL, globalTid = 'x', uint64Value = x'00'",
        "UPDATE NVTX_EVENTS SET domainId = 0.5, eventType = 'x', category = 'x'",
        "UPDATE NVTX_EVENTS SET start = 9223372036854775807, uint64Value = -9223372036854775808",
        "UPDATE StringIds SET id = 'x'",
        "UPDATE TARGET_INFO_SESSION_START_TIME SET utcEpochNs = 'x'",
        "UPDATE ANALYSIS_DETAILS SET duration = 'x'",
        "UPDATE ENUM_NSYS_EVENT_TYPE SET id = 'x'",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x', end = NULL",
        "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET rowid = -9223372036854775807 WHERE rowid = 1",
        "ALTER TABLE NVTX_EVENTS ADD COLUMN more AS (hex(zeroblob(1000000000)))",
        "UPDATE TARGET_INFO_SYSTEM_ENV SET value = char(27) || '[2J'",
    ],
)
def test_a_forged_report_is_read_as_far_as_it_makes_sense(
    statement: str, report: ReportFile, rank: Process
) -> None:
    """Texts where numbers belong, views that never end, rows that are too far apart: no exception,
    no waiting, and nothing for a terminal."""
    rank.pause(1, 10 * MS, until_ns=20 * MS, signals=SUSPEND)
    report.gpu("KERNEL", *((i * 100, i * 100 + 90, rank.global_pid) for i in range(10)))
    for table in ("NVTX_EVENTS", "StringIds", "ENUM_NSYS_EVENT_TYPE", "CUPTI_ACTIVITY_KIND_KERNEL"):
        report.connection.executescript(
            f"CREATE TABLE lax AS SELECT * FROM {table}; DROP TABLE {table}; "
            f"ALTER TABLE lax RENAME TO {table}"
        )
    report.connection.executescript(statement)
    profile = read_profile(report.save())
    assert profile.host is not None
    assert profile.host.isprintable()
    json.dumps(profile_figures(profile), allow_nan=False)


def test_without_nsys_an_export_is_read_and_a_report_is_not(
    report: ReportFile, rank: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is said what to run where; an export beside it that is as new does."""
    rank.pause(1, 10 * MS, until_ns=20 * MS, signals=SUSPEND)
    export = report.save()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert find_nsys() is None
    raw = export.with_suffix(".nsys-rep")
    raw.write_bytes(b"not for us")
    os.utime(export, ns=(0, 0))
    with pytest.raises(NsysMissing, match=r"nsys export --type sqlite rank-0-restart-0\.nsys-rep"):
        read_profile(raw)
    os.utime(raw, ns=(0, 0))
    assert len(read_profile(raw).pauses) == 1
    shutil.copy(export, tmp_path / "rank-1-restart-0.sqlite")
    assert [path.name for path in profiles_in(tmp_path)] == [raw.name, "rank-1-restart-0.sqlite"]


def test_the_view_says_units_and_the_error_of_the_clocks(
    report: ReportFile, rank: Process, tmp_path: Path
) -> None:
    """One row per pause and per stop in 80 columns, and the same as figures; no empty tables."""

    def shown() -> str:
        console = Console(width=80)
        with console.capture() as printed:
            console.print(profile_view(profile))
        return printed.get()

    rank.pause(1, 10 * MS, until_ns=1510 * MS, signals=SUSPEND)
    rank.request("stop_request", 2 * S, "SIGTERM")
    rank.range("saving", 2 * S + 5 * MS, 2 * S + 9 * MS, 7)
    profile = read_profile(report.save())
    text = shown()
    (row,) = [line.split() for line in text.splitlines() if "SIGTSTP" in line]
    assert row[:5] == ["4711", "1", "SIGTSTP", "300", "1.500"]
    for words in ("(µs)", "(s)", "(ms)", "(±µs)"):
        assert words in text
    assert f"to within\n{(profile.alignment_error_ns or 0) / 1e3:,.1f} µs" in text
    figures = json.loads(json.dumps(profile_figures(profile)))
    assert near(figures["pauses"][0]["park_ns"], 300_000, profile.alignment_error_ns)
    assert near(figures["stops"][0]["durable_ns"], 9 * MS, profile.alignment_error_ns)
    empty = ReportFile(tmp_path / "empty.sqlite")
    Process(empty, 1)
    profile = read_profile(empty.save())
    assert "Nothing was paused or stopped" in shown()


@given(
    st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 10**6)), min_size=2, max_size=40),
    st.integers(0, 10**10),
    st.floats(-200e-6, 200e-6),
)
def test_no_mark_is_early_and_so_the_earliest_is_trusted(
    marks: list[tuple[int, int]], at_ns: int, drift: float
) -> None:
    """However late marks are and however the clocks drift: CLOCK_MONOTONIC is never told later than
    it can be, nor earlier than the mark that is least late allows."""

    def mono(nsys_ns: int) -> int:
        return 7 * S + nsys_ns + round(drift * nsys_ns)

    told = Timebase([(ns + late, mono(ns)) for ns, late in marks]).mono(at_ns)
    assert told is not None
    drifted = 500e-6 * max(abs(ns + late - at_ns) for ns, late in marks) + 2
    assert told[0] <= mono(at_ns) + drifted
    since_read = 500e-6 * max(abs(ns - at_ns) for ns, _ in marks) + 2  # the rank's clock, at ns
    assert told[0] >= mono(at_ns) - max(late for _, late in marks) - max(drifted, since_read)
