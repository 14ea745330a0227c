"""Read one nsys report: the marks of each process become its pauses and its stop."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.report.nsys.database import Gpu, open_database
from hydroslurm.report.nsys.export import as_sqlite
from hydroslurm.report.nsys.marks import (
    MOMENTS,
    Mark,
    Marks,
    ProcessMarks,
    Range,
    Timebase,
    read_marks,
)
from hydroslurm.report.nsys.profile import Profile, ProfiledPause, ProfiledStop


def read_profile(path: Path) -> Profile:
    """Read ``*.nsys-rep`` or ``*.sqlite``. A cut-off file is read as far as it goes.

    An ``.nsys-rep`` is turned into SQLite first, which stays beside it where that can be written.

    Raises:
        NsysMissing: the report has to be exported, and there is no ``nsys`` here.
        ProfileError: not a report of nsys, or nothing of it can be read.
    """
    with as_sqlite(path) as exported, open_database(exported) as database:
        marks = read_marks(database)
        timebase = Timebase(marks.clocks)
        paused = [m.global_pid for m in marks.by_pid.values() if m.marks["pause_request"]]
        gpu = Gpu(database, global_pids=paused)
        pauses = [p for pid in marks.pids for p in pauses_of(marks.by_pid[pid], timebase, gpu)]
        stops = [s for pid in marks.pids for s in stops_of(marks.by_pid[pid], timebase)]
        stated = [p.error_ns for p in pauses] + [s.error_ns for s in stops]
        errors = [error_ns for error_ns in stated if error_ns is not None]
        epoch_ns = database.session_epoch_ns()
        return Profile(
            path=path,
            host=database.host(),
            session_epoch_ns=epoch_ns,
            pids=marks.pids,
            pauses=tuple(pauses),
            stops=tuple(stops),
            alignment_error_ns=max(errors, default=None),
            missing=(*database.missing, *_absent(marks, gpu)),
            epoch_offset_ns=timebase.epoch_offset_ns(epoch_ns),
            version=database.version(),
        )


def _absent(marks: Marks, gpu: Gpu) -> list[str]:
    sentences = list(marks.missing)
    if not marks.pids:
        return sentences
    timed = any(several for one in marks.by_pid.values() for several in one.ranges.values())
    if timed and len(marks.clocks) < 2:
        sentences.append(
            f"{len(marks.clocks)} `clock` mark(s) where two are needed: what nsys timed itself "
            "cannot be converted to the clock of the event log"
        )
    if not gpu.pids:
        sentences.append(
            "no kernels, copies or memsets: profiled without --trace=cuda, or no GPU was used"
        )
    elif idle := [str(pid) for pid in marks.pids if pid not in gpu.pids]:
        sentences.append(f"no kernels, copies or memsets of process {', '.join(idle)}")
    return sentences


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
    return [_profiled(marks.pid, pause, timebase, gpu) for pause in _pauses(marks)]


def stops_of(marks: ProcessMarks, timebase: Timebase) -> list[ProfiledStop]:
    """At most one: a process ends with its stop. What it saves before is no part of one."""
    requests, requeueing = marks.marks["stop_request"], marks.ranges["requeueing"]
    if not requests and not requeueing:
        return []
    first = requests[0] if requests else None
    # a save that was under way is waited for, or the state is saved anew: the last one counts
    since_ns = first.nsys_ns if first else 0
    saving = _last([r for r in marks.ranges["saving"] if r.end_ns is None or r.end_ns >= since_ns])
    committing = _last([r for r in marks.ranges["committing"] if saving and _same(r, saving)])
    convert = _Converter(timebase)
    requeued = _last([r for r in requeueing if r.begin_ns >= since_ns])
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


def _same(one: Range, other: Range) -> bool:
    return one.payload == other.payload and one.begin_ns >= other.begin_ns


def _last(ranges: list[Range]) -> Range | None:
    return ranges[-1] if ranges else None


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
    for (number, ranges), begin_ns, end_ns in zip(ordered, begins_ns, ends_ns, strict=False):
        closed, at_rest, opened = (
            [mark for mark in marks.marks[name] if begin_ns <= mark.nsys_ns < end_ns]
            for name in MOMENTS
        )
        asked = _request_of(closed[0], marks.marks["pause_request"]) if closed else None
        resumed = None
        if opened and opened[0].stamp_mono_ns not in stops:
            resumed = _request_of(opened[0], marks.marks["resume_request"])
        last = at_rest[-1] if at_rest else None
        pauses.append(_Between(number, asked, last, resumed, ranges))
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


def _profiled(pid: int, pause: _Between, timebase: Timebase, gpu: Gpu) -> ProfiledPause:
    convert = _Converter(timebase)
    parked_ns, tid = _parked(pause)
    running_ns = _running(pause, timebase)
    drained_ns = pause.ranges["draining"][-1].end_ns if pause.ranges["draining"] else None
    # what is vacated is copied after the drain, and what comes back is copied before threads run
    idle_ns = drained_ns if drained_ns is not None else running_ns
    last_end_ns = None
    if parked_ns is not None:
        last_end_ns = gpu.last_end(pid, before_ns=idle_ns if idle_ns is not None else parked_ns)
    first_ns = gpu.first_start(pid, since_ns=running_ns) if running_ns is not None else None
    return ProfiledPause(
        pid=pid,
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
