"""What a run's events say, as values: lives, pauses and stop requests. Stops are in ``stops``.

A pause whose lines are partly lost (the process was killed, the disk was full) is still a
:class:`Pause`: what is not known is None, and :attr:`Pause.missing` names it. Stamps are
CLOCK_MONOTONIC nanoseconds of the life's own machine.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal

from hydroslurm.report.progress import Progress

PEERS = "peers"

Outcome = Literal["complete", "withdrawn", "not resumed", "not parked", "incomplete"]


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause of one rank, as far as its events tell.

    Attributes:
        rank: global rank.
        number: 1, 2, ... within one life.
        restart_count: how often the job had been requeued before this life.
        causes: why, in order of appearance: ``slurm``, ``user``, ``api``, ``terminal``; ``peers``:
            because another rank of the job was paused.
        signal: the signal that asked for it, None for a call of ``pause()``.
        step: training step when the gate closed, None when nobody told us.
        requested_mono_ns: the signal handler's stamp, or that of the call.
        closed_mono_ns: the gate was armed.
        held_mono_ns: the first operator was held; None when the rank was quiet.
        parked_mono_ns: no training thread issues anything any more, for the first time. A rank that
            is let through to a collective of its peers parks again.
        all_parked_mono_ns: all ranks were told that all of them are parked, at the same
            collectives; None for a rank that is alone, and where that was not reached.
        drained_mono_ns: the devices have finished what was launched; None without devices.
        resume_requested_mono_ns: the stamp of the request that opened the gate.
        resumed_mono_ns: the gate was opened.
        released_mono_ns: the first thread that was held runs again.
        park_us: from the request to parked.
        all_parked_us: from the request, at this rank, until all ranks were parked.
        in_flight: collectives that were in flight then; or when the ranks gave up coming together.
        let_through: collectives that this rank was let through on its way.
        drain_us: how long the devices took to finish what was launched.
        undrained_s: how long they were waited for in vain; None when they drained or there are
            none.
        parked_s: from parked to the opening of the gate.
        resume_us: from the request to the first thread that runs; when no thread was held, to the
            open gate.
        operator: the first operator that was held, such as ``aten::linear``.
        phase: ``forward`` or ``backward``: where that operator was met.
        missing: the events that this pause should have and that the log does not hold.
    """

    rank: int
    number: int
    restart_count: int = 0
    causes: tuple[str, ...] = ()
    signal: str | None = None
    step: int | None = None
    requested_mono_ns: int | None = None
    closed_mono_ns: int | None = None
    held_mono_ns: int | None = None
    parked_mono_ns: int | None = None
    all_parked_mono_ns: int | None = None
    drained_mono_ns: int | None = None
    resume_requested_mono_ns: int | None = None
    resumed_mono_ns: int | None = None
    released_mono_ns: int | None = None
    park_us: float | None = None
    all_parked_us: float | None = None
    in_flight: int | None = None
    let_through: int = 0
    drain_us: float | None = None
    undrained_s: float | None = None
    parked_s: float | None = None
    resume_us: float | None = None
    operator: str | None = None
    phase: str | None = None
    missing: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[type[Pause], tuple[object, ...]]:
        """Of a hundred thousand: what dataclass makes takes three times as long."""
        return Pause, _values_of(self)

    @property
    def complete(self) -> bool:
        return not self.missing

    @property
    def main_cause(self) -> str | None:
        """The first of its own causes, ``peers`` only where it has none; None when they are
        lost."""
        for cause in self.causes:
            if cause != PEERS:
                return cause
        return self.causes[0] if self.causes else None

    @property
    def outcome(self) -> Outcome:
        """In one word what became of it; ``withdrawn`` was resumed before it had parked."""
        parked, resumed = self.parked_mono_ns is not None, self.resumed_mono_ns is not None
        if self.complete:
            return "complete"
        if resumed and not parked:
            return "withdrawn"
        if not resumed:
            return "not resumed" if parked else "not parked"
        return "incomplete"

    @property
    def begin_mono_ns(self) -> int | None:
        """The earliest stamp that is known."""
        stamps = (self.requested_mono_ns, self.closed_mono_ns, self.held_mono_ns)
        later = (self.parked_mono_ns, self.resume_requested_mono_ns, self.resumed_mono_ns)
        return next((stamp for stamp in (*stamps, *later) if stamp is not None), None)


_values_of = attrgetter(*(one.name for one in fields(Pause)))


@dataclass(frozen=True, slots=True)
class StopRequest:
    """A signal that asked a rank to save and leave; the stamp is the handler's."""

    rank: int
    requested_mono_ns: int
    signal: str | None = None
    restart_count: int = 0


@dataclass(frozen=True)
class Life:
    """One process of one rank, from its first event to its last.

    Attributes:
        clock_offset_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC (see ``report.datewatch.DateWatch``).
        clock_error_ns: by how much that changed in the life, unless it was set; None where one
            event cannot tell.
        ended: it uninstalled; False when it was killed or is still running.
        pauses, stops: those of this life. Two stop requests for one preemption are normal.
        progress: what its ``Run`` wrote down; None where there was none.
        world_size: ranks that it was joined with, itself included; 1: it was alone.
        joined_mono_ns: all of them had joined; None for one that was alone.
        boot: of its host; CLOCK_MONOTONIC is one clock within it. None where that was not told.
        date_set_ns: by how much the date was set while the process lived, each time.
        date_ahead_ns: by how much its date was ahead, as it began, of the one that is counted with.
        lost_signals: whose handlers somebody else replaced: such signals were not heard any more.
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
    progress: Progress | None = None
    world_size: int = 1
    clock_error_ns: int | None = None
    joined_mono_ns: int | None = None
    lost_signals: tuple[str, ...] = ()
    boot: str | None = None
    date_set_ns: tuple[int, ...] = ()
    date_ahead_ns: int = 0

    def epoch_ns(self, mono_ns: int) -> int:
        """A stamp of this life as CLOCK_REALTIME, to be lined up with other ranks and lives."""
        return mono_ns + self.clock_offset_ns
