"""The lines of any number of ranks, read as lives. Pure.

A *life* is one process of one rank. A run folder keeps one file per rank over all requeues, so one
file holds several lives, and around a requeue the old process may still write while the new one
does. What tells them apart is the restart count, the host and the pid, never the place in the
file. A process that installs twice has two lives.

Lines are read once and let go: of a life only its pauses, its saves and some stamps are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hydroslurm.core.events import Event, EventKind
from hydroslurm.report.datewatch import DateWatch
from hydroslurm.report.drafts import OF_PAUSES, Pauses
from hydroslurm.report.fields import data_of, integer, text
from hydroslurm.report.lines import Line, Who, lines_of
from hydroslurm.report.pauses import Life, Pause, StopRequest
from hydroslurm.report.progress import OF_A_RUN, Follower

_OF_FOLLOWER = OF_A_RUN | {EventKind.STOP_AGREED}


def lives_of(events: Iterable[Event]) -> tuple[Life, ...]:
    """The lives in the events of any number of ranks, in order of rank and then of appearance.

    Within one file that is the order of time, also when the date was set between two lives.
    """
    return lives_in(lines_of(events))


def lives_in(lines: Iterable[Line]) -> tuple[Life, ...]:
    """As :func:`lives_of`, of lines."""
    drafts: list[_LifeDraft] = []
    newest: dict[tuple[int, int, str, int], _LifeDraft] = {}
    writer: Who | None = None
    draft: _LifeDraft | None = None
    for line in lines:
        # most lines come from the process that wrote the one before
        if line.who is not writer:
            writer, draft = line.who, newest.get(line.who[:4])
        # a life whose first line is lost starts with whatever line comes first
        if draft is None or line.kind is EventKind.INSTALLED:
            date = DateWatch() if draft is None else draft.date
            draft = newest[line.who[:4]] = _LifeDraft(line.who, date)
            drafts.append(draft)
        draft.add(line)
    lives = [draft.finish() for draft in _joined(drafts)]
    return tuple(sorted(lives, key=lambda life: life.rank))


def _joined(drafts: Iterable[_LifeDraft]) -> list[_LifeDraft]:
    """The installations of each process put together, up to a second ``Run``."""
    lives: list[_LifeDraft] = []
    newest: dict[tuple[int, int, str, int], _LifeDraft] = {}
    for draft in drafts:
        life = newest.get(draft.who[:4])
        if life is None or (life.has_run and draft.has_run):
            newest[draft.who[:4]] = draft
            lives.append(draft)
        else:
            life.go_on(draft)
    return lives


class _LifeDraft:
    """A life, or one installation of it, while its lines are being read."""

    def __init__(self, who: Who, date: DateWatch) -> None:
        """``date``: of the process, whose installations share it."""
        self.who = who
        self.date = date
        self._first_ns: int | None = None
        self._last_ns = 0
        self._last_kind: EventKind | None = None
        self._world_size = 1
        self._pauses = Pauses()
        self._pauses_since: list[Pauses] = []
        self._stops: list[StopRequest] = []
        self._progress = Follower()
        self._joined_ns: int | None = None
        self._boot: str | None = None
        self._lost_signals: dict[str, None] = {}

    @property
    def has_run(self) -> bool:
        return self._progress.has_run

    def go_on(self, again: _LifeDraft) -> None:
        """Take in what the process did since it was installed again."""
        assert self._first_ns is not None
        assert again._first_ns is not None
        self._first_ns = min(self._first_ns, again._first_ns)
        self._last_ns = max(self._last_ns, again._last_ns)
        self._last_kind = again._last_kind
        self._world_size = max(self._world_size, again._world_size)
        self._pauses_since += [again._pauses, *again._pauses_since]
        self._stops += again._stops
        self._lost_signals |= again._lost_signals
        self._boot = self._boot or again._boot
        if again.has_run:  # it looked for the other ranks under a name of its own
            self._progress = again._progress
            self._joined_ns = again._joined_ns or self._joined_ns
        elif self._joined_ns is None:
            self._joined_ns = again._joined_ns

    def add(self, line: Line) -> None:
        kind, stamp = line.kind, line.mono_ns
        if self._first_ns is None:
            self._first_ns = self._last_ns = stamp
        elif stamp > self._last_ns:
            self._last_ns = stamp
        elif stamp < self._first_ns:
            self._first_ns = stamp
        self._last_kind = kind
        self.date.see(stamp, line.epoch_ns)
        self._progress.note_step(line.step)
        if kind in OF_PAUSES:
            self._pauses.add(line)
        elif kind in _OF_FOLLOWER:
            self._progress.add(line)
        elif kind is EventKind.STOP_REQUESTED:
            self._stops.append(_stop(line))
        elif kind is EventKind.INSTALLED:
            self._boot = text(line.data, "boot")
        elif kind is EventKind.RANKS_JOINED and self._joined_ns is None:
            self._joined_ns = stamp
        elif kind is EventKind.HANDLER_REPLACED and line.data.get("taken_back") is not True:
            self._lost_signals[text(line.data, "signal") or "a signal"] = None
        elif kind is EventKind.UNINSTALLED and not self._lost_signals:
            self._lost_signals = _lost_unseen(line)
        if "world_size" in line.data:
            self._world_size = max(self._world_size, integer(line.data, "world_size") or 1)

    def finish(self) -> Life:
        assert self._first_ns is not None
        who = self.who
        return Life(
            rank=who.rank,
            restart_count=who.restart_count,
            pid=who.pid,
            host=who.host,
            job_id=who.job_id,
            first_mono_ns=self._first_ns,
            last_mono_ns=self._last_ns,
            clock_offset_ns=self.date.offset_ns,
            clock_error_ns=self.date.error_ns,
            ended=self._last_kind is EventKind.UNINSTALLED,
            pauses=_numbered([self._pauses, *self._pauses_since]),
            stops=tuple(self._stops),
            progress=self._progress.finish(),
            world_size=self._world_size,
            joined_mono_ns=self._joined_ns,
            boot=self._boot or None,
            date_set_ns=tuple(self.date.set_ns),
            lost_signals=tuple(self._lost_signals),
        )


def _numbered(parts: Iterable[Pauses]) -> tuple[Pause, ...]:
    """One after the other: each installation counts its own from 1."""
    found: list[Pause] = []
    for part in parts:
        before = found[-1].number if found else 0
        of_part = part.finish()
        found += (
            [replace(one, number=one.number + before) for one in of_part] if before else of_part
        )
    return tuple(found)


def _lost_unseen(line: Line) -> dict[str, None]:
    """Where nobody looked before the end, how many they were is known, and not which."""
    number = integer(line.data, "handlers_replaced_by_others") or 0
    return {f"{number} signal{'' if number == 1 else 's'}": None} if number > 0 else {}


def _stop(line: Line) -> StopRequest:
    data = data_of(line)
    requested = integer(data, "requested_mono_ns")
    return StopRequest(
        rank=line.who.rank,
        requested_mono_ns=line.mono_ns if requested is None else requested,
        signal=text(data, "signal"),
        restart_count=line.who.restart_count,
    )
