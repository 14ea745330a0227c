"""How much of a run's time became steps that counted, and what became of the rest. Pure.

Goodput is productive time ÷ time, as Google's ml-goodput-measurement defines it
(https://docs.cloud.google.com/tpu/docs/goodput: "the proportion of usage time spent making
productive, preserved training progress"). It is measured on the first rank, whose steps are those
of all ranks:

- productive: from the end of an attempt's first step to its last one, minus what is listed below;
- made again: the share of that which the next attempt had to repeat;
- saving: the training waited for a copy of its state, or for a save in the foreground;
- parked: from a pause's request until the rank ran again;
- starting: from the start of the allocation to the end of the attempt's first step; that step is
  included, because nothing separates it from the load before it;
- leaving: from the safe point of a stop, or the end of the training, to the end of the allocation;
- unknown: everything after the last event of a process that was killed;
- queued: the job was in Slurm's queue. Not part of the allocated time.

Allocated and wall time come from Slurm if it was asked. Otherwise they extend from an attempt's
first event to its last, and the time between attempts, Python's start included, is ``queued``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hydroslurm.report.attempts import Attempt
from hydroslurm.report.external_sources import ExternalSources
from hydroslurm.report.history import History
from hydroslurm.report.tables import figure

Span = tuple[float, float]


@dataclass
class Goodput:
    """Seconds of one run, of its first rank."""

    # fmt: off
    of_allocated: float | None = figure(
        "Productive ÷ allocated time; null where no steps were recorded.")
    of_wall: float | None = figure(
        "Productive time ÷ wall clock; null where no steps were recorded.")
    at_most: bool = figure(
        "True where more steps than known may have been repeated.", default=False)
    allocated_from: Literal["slurm", "events", "both"] = figure(
        "Source of the allocated time; `both`: Slurm does not know some attempts.",
        default="events")
    wall_s: float = figure(
        "From the submission, or the first event, to the end, or the last event.", default=0.0)
    allocated_s: float = figure("The job held its nodes, including suspended time.", default=0.0)
    productive_s: float = figure("Steps that counted.", "steps that counted", default=0.0)
    made_again_s: float = figure(
        "Steps that a later attempt repeated.", "steps repeated", default=0.0)
    saving_s: float = figure(
        "Waiting for a copy of the state, or for a save in the foreground.",
        "waiting for saves", default=0.0)
    parked_s: float = figure(
        "From each pause's request until the rank ran again.", "parked", default=0.0)
    starting_s: float = figure(
        "From the start of the allocation to the end of an attempt's first step.",
        "starting up", default=0.0)
    leaving_s: float = figure(
        "From a stop's safe point, or the training's end, to the end of the allocation.",
        "saving and leaving", default=0.0)
    unknown_s: float = figure(
        "After the last event of a killed process; all, if no steps were recorded.",
        "unknown", default=0.0)
    queued_s: float = figure("Between allocations, and before the first.", default=0.0)
    steps: int = figure("How many counted.", default=0)
    step_s: float | None = figure("Mean seconds of a step.")


def goodput_of(history: History, sources: ExternalSources) -> Goodput | None:
    """None for a run without events."""
    if not history.attempts:
        return None
    attempts = history.attempts_of(history.ranks[0])
    allocations = _allocations(history, sources, attempts)
    lost = {id(one.attempt): one.stop for one in history.stopped}
    found = Goodput(at_most=any(not stop.steps_lost_exactly for stop in history.stops))
    timed_steps = 0
    for one in allocations:
        at_s = one.begin_s
        for attempt in one.attempts:
            stop = lost.get(id(attempt))
            steps_lost = (stop.steps_lost or 0) if stop else 0
            timed_steps += _add(found, _Window(history, attempt), at_s, lost=steps_lost)
            at_s = max(at_s, history.since_begin_s(attempt, attempt.last_mono_ns))
        rest_s = max(0.0, one.end_s - at_s)
        if one.attempts and one.attempts[-1].ended:
            found.leaving_s += rest_s
        else:
            found.unknown_s += rest_s
    found.allocated_s = sum(one.end_s - one.begin_s for one in allocations)
    begin_s = min(one.begin_s for one in allocations)
    first = sources.accounting.of(attempts[0])
    if first is not None and first.submit_epoch_s is not None:
        ahead_ns = attempts[0].date_ahead_ns
        begin_s = min(begin_s, _since_begin(history, first.submit_epoch_s, 0.0, ahead_ns))
    found.wall_s = max(one.end_s for one in allocations) - begin_s
    found.queued_s = max(0.0, found.wall_s - found.allocated_s)
    by_slurm = {one.by_slurm for one in allocations}
    if True in by_slurm:
        found.allocated_from = "both" if False in by_slurm else "slurm"
    if timed_steps:
        found.step_s = (found.productive_s + found.made_again_s) / timed_steps
    if found.steps > 0:
        found.of_allocated = found.productive_s / found.allocated_s if found.allocated_s else None
        found.of_wall = found.productive_s / found.wall_s if found.wall_s else None
    return found


@dataclass
class _Allocation:
    """Seconds since the run's begin, and the processes in it."""

    begin_s: float
    end_s: float
    by_slurm: bool
    attempts: list[Attempt] = field(default_factory=list)


def _allocations(
    history: History, sources: ExternalSources, attempts: Sequence[Attempt]
) -> list[_Allocation]:
    """In order of time, none over another."""
    found: dict[object, _Allocation] = {}
    for attempt in attempts:
        begin_s, end_s = (
            history.begin_s(attempt),
            history.since_begin_s(attempt, attempt.last_mono_ns),
        )
        known = sources.accounting.of(attempt)
        key: object = known or id(attempt)
        if known is None:
            found[key] = _Allocation(begin_s, end_s, False, [attempt])
            continue
        ahead_ns = attempt.date_ahead_ns
        start_s = _since_begin(history, known.start_epoch_s, begin_s, ahead_ns)
        stop_s = _since_begin(
            history, known.end_epoch_s, end_s, ahead_ns, ahead_ns + sum(attempt.date_set_ns)
        )
        mine = found.setdefault(key, _Allocation(start_s, stop_s, True))
        mine.begin_s, mine.end_s = min(mine.begin_s, begin_s), max(mine.end_s, end_s)
        mine.attempts.append(attempt)
    ordered = sorted(found.values(), key=lambda one: one.begin_s)
    for before, after in itertools.pairwise(ordered):
        after.begin_s = max(after.begin_s, before.end_s)  # a process that dies beside its successor
        after.end_s = max(after.end_s, after.begin_s)
    return ordered


def _since_begin(
    history: History, epoch_s: int | None, otherwise_s: float, *ahead_ns: int
) -> float:
    """A moment of Slurm's. Where a date was set (to be ``ahead_ns`` of what is counted with) the
    controller's may have been the same one: what is nearest to the event log is believed."""
    if epoch_s is None:
        return otherwise_s
    at_s = epoch_s - history.begin_epoch_ns / 1e9
    return min(
        (at_s - by_ns / 1e9 for by_ns in (0, *ahead_ns)), key=lambda one: abs(one - otherwise_s)
    )


class _Window:
    """The time of one attempt in which it made steps, in seconds since the run's begin."""

    def __init__(self, history: History, attempt: Attempt) -> None:
        self._history = history
        self._attempt = attempt
        progress = attempt.progress
        self.has_steps = progress.began_step is not None
        first = progress.first_step_mono_ns
        end_s = self._at(progress.leave_mono_ns or attempt.last_mono_ns)
        if not progress.has_run:
            self.span: Span | None = (self._at(attempt.first_mono_ns), end_s)
        else:
            self.span = None if first is None else (self._at(first), max(self._at(first), end_s))
        self.last_s = self._at(attempt.last_mono_ns)
        self.steps = 0
        if progress.last_step is not None and progress.began_step is not None:
            self.steps = max(0, progress.last_step - progress.began_step)

    def parked(self) -> list[Span]:
        last_ns = self._attempt.last_mono_ns
        return self._clipped(
            (pause.begin_mono_ns, pause.released_mono_ns or pause.resumed_mono_ns or last_ns)
            for pause in self._attempt.pauses
        )

    def saving(self) -> list[Span]:
        """The training waits for the copy; for the commit where no copy is made before."""
        return self._clipped(
            (save.started_mono_ns, save.staged_mono_ns or save.end_mono_ns)
            for save in self._attempt.progress.saves
        )

    def _clipped(self, stamps: Iterable[tuple[int | None, int | None]]) -> list[Span]:
        if self.span is None:
            return []
        low_s, high_s = self.span
        found = []
        for begin_ns, end_ns in stamps:
            if begin_ns is not None and end_ns is not None:
                span = (max(low_s, self._at(begin_ns)), min(high_s, self._at(end_ns)))
                if span[0] < span[1]:
                    found.append(span)
        return found

    def _at(self, mono_ns: int) -> float:
        return self._history.since_begin_s(self._attempt, mono_ns)


def _add(found: Goodput, window: _Window, at_s: float, *, lost: int) -> int:
    """Add one attempt; ``at_s``: until when the time before it is accounted for. Return how many of
    its steps took the time that was trained."""
    if window.span is None:
        found.starting_s += max(0.0, window.last_s - at_s)
        return 0
    begin_s, end_s = window.span
    found.starting_s += max(0.0, begin_s - at_s)
    begin_s = max(begin_s, at_s)
    found.leaving_s += max(0.0, window.last_s - max(end_s, at_s))
    parked = window.parked()
    parked_s = _covered(parked)
    saving_s = _covered([*parked, *window.saving()]) - parked_s
    trained_s = max(0.0, end_s - begin_s - parked_s - saving_s)
    found.parked_s += parked_s
    found.saving_s += saving_s
    if not window.has_steps:
        found.unknown_s += trained_s
        return 0
    timed = max(0, window.steps - 1)
    again_s = trained_s * min(lost, timed) / timed if timed else 0.0
    found.steps += max(0, window.steps - lost)
    found.made_again_s += again_s
    found.productive_s += trained_s - again_s
    return timed


def _covered(spans: Iterable[Span]) -> float:
    """The length of their union."""
    covered_s, upto_s = 0.0, float("-inf")
    for begin_s, end_s in sorted(spans):
        covered_s += max(0.0, end_s - max(begin_s, upto_s))
        upto_s = max(upto_s, end_s)
    return covered_s
