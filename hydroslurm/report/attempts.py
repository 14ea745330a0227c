"""The attempts of any number of ranks, built from their events. Pure.

Here an *attempt* is one process of one rank. A run folder keeps one file per rank over all
requeues, so a file holds several attempts, and around a requeue the old process may write while
the new one already does. The restart count, host and pid tell them apart, never the position in
the file. A process that installs twice makes two attempts only if it makes two ``Run``s.

Lines are read once and dropped: an attempt keeps its pauses, saves and some timestamps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import clean
from hydroslurm.core.goodput import AttemptTime
from hydroslurm.report.lines import integer, text
from hydroslurm.report.pauses import OF_PAUSES, Pause, PausesBuilder
from hydroslurm.report.progress import OF_A_RUN, Progress, ProgressBuilder

_OF_PROGRESS = OF_A_RUN | {EventKind.STOP_AGREED}
_Process = tuple[int, int, str, int]
"""Rank, restart count, host and pid."""

_BUCKET_NS = 10 * 10**9


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A signal that asked a rank to save and exit, with the handler's timestamp."""

    requested_mono_ns: int
    signal: str | None


@dataclass(frozen=True)
class Attempt:
    """One process of one rank, from its first event to its last.

    Attributes:
        clock_offset_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC (see :class:`DateWatch`).
        clock_error_ns: how much that changed during the attempt; None if there are too few events
            to measure it.
        ended: it uninstalled; False if it was killed or is still running.
        pauses, stops: of this attempt. Two stop requests per preemption are normal.
        progress: what its ``Run`` recorded.
        world_size: ranks in its group, including itself.
        joined_mono_ns: when all of them had joined; None for a single rank.
        boot: its host's boot id; CLOCK_MONOTONIC is one clock within it. None if unknown.
        lost_signals: signals without effect because other code replaced their handlers.
        time: how its time was spent.
    """

    rank: int
    restart_count: int
    pid: int
    host: str
    job_id: int | None
    first_mono_ns: int
    last_mono_ns: int
    clock_offset_ns: int
    ended: bool
    pauses: tuple[Pause, ...] = ()
    stops: tuple[StopRequest, ...] = ()
    progress: Progress = field(default_factory=Progress)
    world_size: int = 1
    clock_error_ns: int | None = None
    joined_mono_ns: int | None = None
    lost_signals: tuple[str, ...] = ()
    boot: str | None = None
    time: AttemptTime = field(default_factory=AttemptTime)

    def epoch_ns(self, mono_ns: int) -> int:
        """Convert a timestamp of this attempt to CLOCK_REALTIME, comparable across attempts."""
        return mono_ns + self.clock_offset_ns


def attempts_of(events: Iterable[Event]) -> tuple[Attempt, ...]:
    """Build the attempts of any number of ranks, ordered by rank, then by appearance in the file.

    Appearance is the order in time, even if the date was set between two attempts.
    """
    drafts: list[_AttemptDraft] = []
    newest: dict[_Process, _AttemptDraft] = {}
    for event in events:
        process = (event.rank, event.restart_count, event.host, event.pid)
        draft = newest.get(process)
        # if its first line is lost, an attempt starts with the next one
        if draft is None or event.kind is EventKind.INSTALLED:
            date = DateWatch() if draft is None else draft.date
            time = AttemptTime(event.mono_ns, event.mono_ns)
            if draft is not None and draft.time.began_step is None:
                time = draft.time
            draft = newest[process] = _AttemptDraft(process, event.job_id, date, time)
            drafts.append(draft)
        draft.add(event)
    attempts = [draft.finish() for draft in _joined(drafts)]
    return tuple(sorted(attempts, key=lambda attempt: attempt.rank))


def _joined(drafts: Iterable[_AttemptDraft]) -> list[_AttemptDraft]:
    """Merge the installations of each process, up to a second ``Run``."""
    attempts: list[_AttemptDraft] = []
    newest: dict[_Process, _AttemptDraft] = {}
    for draft in drafts:
        attempt = newest.get(draft.process)
        if attempt is None or (attempt.has_run and draft.has_run):
            newest[draft.process] = draft
            attempts.append(draft)
        else:
            attempt.extend(draft)
    return attempts


class _AttemptDraft:
    """Collects the lines of an attempt, or of one installation in it."""

    def __init__(
        self, process: _Process, job_id: int | None, date: DateWatch, time: AttemptTime
    ) -> None:
        """``date`` and, up to its Run, ``time`` are shared by the process's installations."""
        self.process = process
        self._job_id = job_id
        self.date = date
        self._first_ns: int | None = None
        self._last_ns = 0
        self._last_kind: EventKind | None = None
        self._world_size = 1
        self._pauses = PausesBuilder()
        self._pauses_since: list[PausesBuilder] = []
        self._stops: list[StopRequest] = []
        self._progress = ProgressBuilder()
        self.time = time
        self._joined_ns: int | None = None
        self._boot: str | None = None
        self._lost_signals: dict[str, None] = {}

    @property
    def has_run(self) -> bool:
        return self._progress.has_run

    def extend(self, draft: _AttemptDraft) -> None:
        """Merge what the process did after it installed draft."""
        assert self._first_ns is not None
        assert draft._first_ns is not None
        self._first_ns = min(self._first_ns, draft._first_ns)
        self._last_ns = max(self._last_ns, draft._last_ns)
        self._last_kind = draft._last_kind
        self._world_size = max(self._world_size, draft._world_size)
        self._pauses_since += [draft._pauses, *draft._pauses_since]
        self._stops += draft._stops
        self._lost_signals |= draft._lost_signals
        self._boot = self._boot or draft._boot
        if draft.has_run:  # the new Run searched for the other ranks under its own name
            self._progress = draft._progress
            self.time = draft.time
            self._joined_ns = draft._joined_ns or self._joined_ns
        elif self._joined_ns is None:
            self._joined_ns = draft._joined_ns

    def add(self, event: Event) -> None:
        kind, stamp = event.kind, event.mono_ns
        if self._first_ns is None:
            self._first_ns = self._last_ns = stamp
        elif stamp > self._last_ns:
            self._last_ns = stamp
        elif stamp < self._first_ns:
            self._first_ns = stamp
        self._last_kind = kind
        self.date.see(stamp, event.epoch_ns)
        self._progress.note_step(event.step)
        self.time.add(event)
        if kind in OF_PAUSES:
            self._pauses.add(event)
        elif kind in _OF_PROGRESS:
            self._progress.add(event)
        elif kind is EventKind.STOP_REQUESTED:
            self._stops.append(_stop(event))
        elif kind is EventKind.INSTALLED:
            self._boot = text(event.data, "boot")
        elif kind is EventKind.RANKS_JOINED and self._joined_ns is None:
            self._joined_ns = stamp
        elif kind is EventKind.UNINSTALLED:
            self._lost_signals = _lost_unseen(event)
        if "world_size" in event.data:
            self._world_size = max(self._world_size, integer(event.data, "world_size") or 1)

    def finish(self) -> Attempt:
        assert self._first_ns is not None
        rank, restart_count, host, pid = self.process
        progress = self._progress.finish()
        self.time.pass_until(self._last_ns)
        self.time.step = progress.last_step
        return Attempt(
            rank=rank,
            restart_count=restart_count,
            pid=pid,
            host=clean(host),
            job_id=self._job_id,
            first_mono_ns=self._first_ns,
            last_mono_ns=self._last_ns,
            clock_offset_ns=self.date.offset_ns,
            clock_error_ns=self.date.error_ns,
            ended=self._last_kind is EventKind.UNINSTALLED,
            pauses=_numbered([self._pauses, *self._pauses_since]),
            stops=tuple(self._stops),
            progress=progress,
            world_size=self._world_size,
            joined_mono_ns=self._joined_ns,
            boot=self._boot or None,
            lost_signals=tuple(self._lost_signals),
            time=self.time,
        )


def _numbered(parts: Iterable[PausesBuilder]) -> tuple[Pause, ...]:
    """Number the pauses in sequence: each installation counts its own from 1."""
    pauses: list[Pause] = []
    for part in parts:
        before = pauses[-1].number if pauses else 0
        of_part = part.finish()
        pauses += [replace(p, number=p.number + before) for p in of_part] if before else of_part
    return tuple(pauses)


def _lost_unseen(event: Event) -> dict[str, None]:
    """Return the lost handlers' number; without a check before the end nothing else is known."""
    number = integer(event.data, "handlers_replaced_by_others") or 0
    return {f"{number} signal{'' if number == 1 else 's'}": None} if number > 0 else {}


def _stop(event: Event) -> StopRequest:
    requested = integer(event.data, "requested_mono_ns")
    stamp_ns = event.mono_ns if requested is None else requested
    return StopRequest(stamp_ns, text(event.data, "signal"))


class DateWatch:
    """The date of one process relative to CLOCK_MONOTONIC.

    An event is stamped when it happens and dated when it is recorded, so the difference of its
    clocks is never too small; the least of each 10 s counts. A value above both its neighbours was
    recorded late, for example by a process that had been stopped in between.
    """

    def __init__(self) -> None:
        self._least: dict[int, int] = {}

    def see(self, mono_ns: int, epoch_ns: int) -> None:
        bucket, offset_ns = mono_ns // _BUCKET_NS, epoch_ns - mono_ns
        if offset_ns < self._least.setdefault(bucket, offset_ns):
            self._least[bucket] = offset_ns

    @property
    def offset_ns(self) -> int:
        """Return the date minus CLOCK_MONOTONIC."""
        return statistics.median_low(self._believed())

    @property
    def error_ns(self) -> int | None:
        """Return the largest deviation from it; None for an attempt of a few seconds."""
        believed = self._believed()
        if len(believed) < 2:
            return None
        offset_ns = self.offset_ns
        return max(abs(offset - offset_ns) for offset in believed)

    def _believed(self) -> list[int]:
        least = [self._least[bucket] for bucket in sorted(self._least)]
        if len(least) < 2:
            return least
        padded = [least[1], *least, least[-2]]
        around = zip(padded, padded[1:], padded[2:], strict=False)
        return [min(offset, max(before, after)) for before, offset, after in around]
