"""The NVTX marks and ranges of the domain ``hydroslurm`` in a report, and nsys's clock by them.

What each of them means is written in ``hydroslurm/gate/native/marks.h``.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from hydroslurm.report.nsys.database import Database, global_pid_of, pid_of, tid_of

DOMAIN = "hydroslurm"
CLOCK = "clock"
REQUESTS = ("pause_request", "resume_request", "stop_request")
MOMENTS = ("gate_closed", "at_rest", "gate_opened")
RANGES = (
    "pausing",
    "parked",
    "resuming",
    "draining",
    "saving",
    "committing",
    "requeueing",
    "vacating",
    "restoring",
)

_MARK, _PUSH_POP, _START_END, _DOMAIN_CREATE = 34, 59, 60, 75


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


@dataclass(frozen=True)
class Marks:
    """All of one report."""

    by_pid: dict[int, ProcessMarks]
    clocks: list[tuple[int, int]]
    """nsys's time and CLOCK_MONOTONIC read just before it, in order; of all processes, which have
    both clocks in common."""
    missing: tuple[str, ...]

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(sorted(self.by_pid))


def read_marks(database: Database) -> Marks:
    """What the report holds of hydroslurm; without any, ``missing`` says why."""
    columns = database.columns("NVTX_EVENTS")
    wanted = {"start", "end", "eventType", "globalTid", "textId", "domainId"}
    if not columns:
        return _none("no NVTX events: profiled without --trace=nvtx, or nothing emitted any")
    if not wanted <= columns:
        return _none(f"NVTX events without {', '.join(sorted(wanted - columns))}: unknown schema")
    domains = _domains(database)
    if not domains:
        return _none(
            f"no NVTX domain {DOMAIN!r}: hydroslurm was not installed in what was profiled, was "
            "built without NVTX, or HYDROSLURM_NVTX=off"
        )
    if "uint64Value" not in columns:
        return _none("NVTX events without payloads (uint64Value): pauses cannot be distinguished")
    return _sorted_out(database, domains, has_category="category" in columns)


def _none(why: str) -> Marks:
    return Marks(by_pid={}, clocks=[], missing=(why,))


def _domains(database: Database) -> set[tuple[int, int]]:
    """Process and number of its domain: each process counts its domains for itself."""
    ids = database.string_ids([DOMAIN])
    create = database.event_type("NvtxDomainCreate", _DOMAIN_CREATE)
    sql = "SELECT globalTid, domainId, text, textId FROM NVTX_EVENTS WHERE eventType = ?"
    return {
        (global_pid_of(global_tid), domain)
        for global_tid, domain, text, text_id in database.rows(
            sql, (create,), what="NVTX domains", integers=(0, 1)
        )
        if text == DOMAIN or text_id in ids
    }


def _sorted_out(database: Database, domains: set[tuple[int, int]], *, has_category: bool) -> Marks:
    ids = database.string_ids([CLOCK, *REQUESTS, *MOMENTS, *RANGES])
    by_pid = {
        pid_of(global_pid): ProcessMarks(pid_of(global_pid), global_pid)
        for global_pid, _ in domains
    }
    clocks: list[tuple[int, int]] = []
    mark = database.event_type("NvtxMark", _MARK)
    last_ns = database.end_ns()
    # by id, so that millions of rows of operators are passed over without reading their text
    sql = (
        f"SELECT start, end, eventType, {'category' if has_category else 0}, globalTid, textId, "
        f"domainId, uint64Value FROM NVTX_EVENTS WHERE textId IN ({', '.join('?' * len(ids))}) "
        "AND uint64Value IS NOT NULL"
    )
    rows = database.rows(
        sql, list(ids), what="NVTX events", integers=(0, 2, 4, 5, 6, 7), if_any=(1, 3)
    )
    for start, end, kind, category, global_tid, text_id, domain, payload in sorted(
        rows, key=lambda row: row[0]
    ):
        name = ids[text_id]
        if (global_pid_of(global_tid), domain) not in domains:
            continue
        process = by_pid[pid_of(global_tid)]
        if kind != mark and name in RANGES:
            # nsys ends what was not ended with its recording
            end_ns = None if end == last_ns else end
            process.ranges[name].append(Range(start, end_ns, payload, tid_of(global_tid)))
        elif kind == mark and name == CLOCK:
            clocks.append((start, payload))
        elif kind == mark:
            signal = (category or 0) if name in REQUESTS else 0
            process.marks[name].append(Mark(start, payload, signal))
    return Marks(by_pid, clocks, ())


# --- nsys's time -> CLOCK_MONOTONIC -------------------------------------------------------------
#
# nsys counts from the start of its recording, by a clock of its own: beside CLOCK_MONOTONIC, which
# NTP slews, it drifts by microseconds in a second. The job emits marks ``clock`` whose payload is
# CLOCK_MONOTONIC, read just before. nsys stamps such a mark late, by as long as the thread was held
# up in between, and never early: so CLOCK_MONOTONIC minus nsys's time is never below what a mark
# says, and of the marks around a moment the one that says most is the best.

NEIGHBOURS = 8
"""Marks on each side that are looked at."""
DRIFT_MAX = 500e-6
"""What the kernel slews CLOCK_MONOTONIC by at most."""
DRIFT_MIN = 10e-6
_CLOSE_NS = 10_000_000
"""Closer marks measure each other's delay; the drift is no more than 5 us in this time."""
_APART_NS = 1_000_000_000
"""Marks further apart than this measure the drift."""


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
        near = range(max(0, at - NEIGHBOURS), min(len(self._times), at + NEIGHBOURS))
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
            return DRIFT_MAX
        return min(DRIFT_MAX, max(DRIFT_MIN, statistics.median(slopes)))
