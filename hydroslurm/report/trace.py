"""A run as a trace for ui.perfetto.dev or chrome://tracing: ``report/trace.json``.

The JSON object form of the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): a process per
attempt, named after its rank, with three threads: the training, the parts of each pause, and saves.
Complete events (``X``) of one thread overlap only if one contains the other, as the format demands;
requests are instants (``i``). Times are microseconds since the run's first event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.history import History
from hydroslurm.report.pauses import Pause

MOST_EVENTS = 50_000
"""Size that a browser opens in a second or two."""

_TRAINING, _PAUSING, _SAVING = 1, 2, 3
_THREADS = {_TRAINING: "training", _PAUSING: "pauses", _SAVING: "saves and stops"}
Entry = dict[str, Any]


def trace_of(history: History) -> dict[str, Any]:
    """Build the object to write. If a run is too large, omit the later pauses and saves of each
    attempt; ``otherData`` says how many."""
    attempts = history.attempts[: MOST_EVENTS // 20]
    room = max(1, MOST_EVENTS // 10 // max(1, len(attempts)))
    entries: list[Entry] = []
    pauses = saves = 0
    for number, attempt in enumerate(attempts, start=1):
        entries += _attempt(history, attempt, number, room=room)
        pauses += max(0, len(attempt.pauses) - room)
        saves += max(0, len(attempt.progress.saves) - room)
    other = {
        "run": history.name,
        "attempts_left_out": len(history.attempts) - len(attempts),
        "pauses_left_out": pauses,
        "saves_left_out": saves,
        "clocks": history.alignment.message,
    }
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": other}


class _Writer:
    """Entries of one attempt, cut off at its end."""

    def __init__(self, history: History, attempt: Attempt, number: int) -> None:
        self._history = history
        self._attempt = attempt
        self._number = number

    def slice(
        self, thread: int, name: str, begin_ns: int | None, end_ns: int | None, **args: Any
    ) -> Iterator[Entry]:
        """Yield nothing if an end is unknown, or the ends are in the wrong order."""
        if begin_ns is None or end_ns is None or end_ns < begin_ns:
            return
        begin_us = self._us(begin_ns)
        entry = self._entry("X", thread, name, begin_us, args)
        yield {**entry, "dur": max(0.001, round(self._us(end_ns) - begin_us, 3))}

    def instant(self, thread: int, name: str, at_ns: int | None, **args: Any) -> Iterator[Entry]:
        if at_ns is not None:
            yield {**self._entry("i", thread, name, self._us(at_ns), args), "s": "t"}

    def names(self) -> Iterator[Entry]:
        attempt, history = self._attempt, self._history
        name = f"rank {attempt.rank}"
        if history.several_attempts:
            name += f", attempt {history.attempt_number(attempt)}"
        process = {"ph": "M", "pid": self._number, "tid": 0, "ts": 0}
        name += f" ({attempt.host}, pid {attempt.pid})"
        yield {**process, "name": "process_name", "args": {"name": name}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": self._number}}
        for tid, thread in _THREADS.items():
            yield {**process, "tid": tid, "name": "thread_name", "args": {"name": thread}}

    def _entry(
        self, phase: str, thread: int, name: str, at_us: float, args: dict[str, Any]
    ) -> Entry:
        known = {key: value for key, value in args.items() if value is not None}
        where = {"pid": self._number, "tid": thread, "ts": round(at_us, 3)}
        return {"ph": phase, "cat": "hydroslurm", "name": name, **where, "args": known}

    def _us(self, mono_ns: int) -> float:
        return self._history.since_begin_s(self._attempt, mono_ns) * 1e6


def _attempt(history: History, attempt: Attempt, number: int, *, room: int) -> Iterator[Entry]:
    write = _Writer(history, attempt, number)
    yield from write.names()
    progress = attempt.progress
    first_ns = progress.first_step_mono_ns
    yield from write.slice(_TRAINING, "starting", attempt.first_mono_ns, first_ns)
    yield from write.slice(
        _TRAINING,
        "training",
        first_ns if progress.has_run else attempt.first_mono_ns,
        progress.leave_mono_ns or attempt.last_mono_ns,
        began_step=progress.began_step,
        last_step=progress.last_step,
    )
    for request in attempt.stops[:room]:
        yield from write.instant(
            _SAVING, "stop_request", request.requested_mono_ns, signal=request.signal
        )
    for save in progress.saves[:room]:
        known = {"step": save.step, "kind": save.kind, "state_bytes": save.state_bytes}
        # save_written is missing if the save failed in between
        staged = save.written_mono_ns or save.staged_mono_ns or save.started_mono_ns
        yield from write.slice(_SAVING, "saving", save.started_mono_ns, save.end_mono_ns, **known)
        yield from write.slice(_SAVING, "committing", staged, save.durable_mono_ns)
    left_ns, requeued_ns = progress.safe_point_mono_ns, progress.requeued_mono_ns
    yield from write.slice(
        _TRAINING, "leaving", left_ns, attempt.last_mono_ns, reason=progress.reason
    )
    yield from write.instant(_SAVING, "safe_point", left_ns)
    saved_ns = progress.saved.durable_mono_ns if requeued_ns else None
    yield from write.slice(_SAVING, "requeueing", saved_ns, requeued_ns)
    for pause in attempt.pauses[:room]:
        yield from _pause(write, attempt, pause)


def _pause(write: _Writer, attempt: Attempt, pause: Pause) -> Iterator[Entry]:
    """Yield ``parked`` on the training's thread and, beside it, its parts in sequence."""
    known = {"pause": pause.number, "causes": "+".join(pause.causes) or None, "step": pause.step}
    requested, parked = pause.requested_mono_ns, pause.parked_mono_ns
    running = pause.released_mono_ns or pause.resumed_mono_ns or attempt.last_mono_ns
    yield from write.instant(_PAUSING, "pause_request", requested, signal=pause.signal)
    yield from write.slice(_PAUSING, "pausing", requested, parked, **known, operator=pause.operator)
    yield from write.slice(_TRAINING, "parked", parked, running, **known)
    drained = pause.drained_mono_ns
    opened = pause.resumed_mono_ns or attempt.last_mono_ns
    if drained is not None and drained <= opened:
        yield from write.slice(_PAUSING, "draining", parked, drained)
    for name, end, took_s in (
        ("vacating", pause.vacated_mono_ns, pause.vacate_s),
        ("restoring", pause.restored_mono_ns, pause.restore_s),
    ):
        began = None if end is None or took_s is None else end - int(took_s * 1e9)
        if began is not None and drained is not None and drained <= (end or 0):
            # a vacate itself waits for the device, and slices must not overlap
            began = max(began, drained)
        yield from write.slice(_PAUSING, name, began, end, bytes=pause.vacated_bytes)
    yield from write.instant(_PAUSING, "all_parked", pause.all_parked_mono_ns)
    yield from write.instant(_PAUSING, "resume_request", pause.resume_requested_mono_ns)
    yield from write.slice(
        _PAUSING, "resuming", pause.resume_requested_mono_ns, pause.released_mono_ns
    )
