"""All attempts, pauses and stops of a run: what figures, tables and pictures are made from.

:mod:`~hydroslurm.report.reading` makes it from a run folder. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from typing_extensions import NotRequired, TypedDict

from hydroslurm.report.attempts import Attempt, StopRequest
from hydroslurm.report.clocks import Alignment
from hydroslurm.report.pauses import Pause
from hydroslurm.report.progress import Save
from hydroslurm.report.stops import Stop, Stopped, stops_of


@dataclass(frozen=True)
class History:
    """Everything that happened in one run, all ranks and all attempts.

    Attributes:
        events: lines that were read.
        missing: what could not be read, in sentences.
        alignment: how the clocks of attempts and hosts were aligned.
    """

    name: str
    attempts: tuple[Attempt, ...] = ()
    events: int = 0
    missing: tuple[str, ...] = ()
    alignment: Alignment = field(default_factory=Alignment)

    @cached_property
    def pauses(self) -> tuple[Pause, ...]:
        """In order of rank, then of time."""
        return tuple(pause for attempt in self.attempts for pause in attempt.pauses)

    @property
    def saves(self) -> tuple[Save, ...]:
        """In order of rank, then of time."""
        return tuple(save for attempt in self.attempts for save in attempt.progress.saves)

    @property
    def stop_requests(self) -> tuple[StopRequest, ...]:
        """All of them: two for one preemption are normal."""
        return tuple(stop for attempt in self.attempts for stop in attempt.stops)

    @cached_property
    def stopped(self) -> tuple[Stopped, ...]:
        """The stops with their attempts, in order of rank, then of time."""
        return stops_of(self.attempts)

    @property
    def stops(self) -> tuple[Stop, ...]:
        return tuple(stopped.stop for stopped in self.stopped)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._by_rank)

    def attempts_of(self, rank: int) -> tuple[Attempt, ...]:
        """The attempts of one rank, in order of time."""
        return self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Attempt, ...]]:
        found: dict[int, list[Attempt]] = {}
        for attempt in self.attempts:
            found.setdefault(attempt.rank, []).append(attempt)
        return {rank: tuple(attempts) for rank, attempts in sorted(found.items())}

    @property
    def job_ids(self) -> tuple[int, ...]:
        return tuple(
            sorted({attempt.job_id for attempt in self.attempts if isinstance(attempt.job_id, int)})
        )

    def attempt_number(self, attempt: Attempt) -> int:
        """1 for the first attempt of its rank."""
        return self._numbers[id(attempt)]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """By identity: an attempt holds all its pauses, which would be compared one by one."""
        by_rank = self._by_rank.values()
        return {
            id(attempt): n for attempts in by_rank for n, attempt in enumerate(attempts, start=1)
        }

    @property
    def several_attempts(self) -> bool:
        """Whether any rank has lived more than once: requeued, or started again by hand."""
        return len(self.attempts) > len(self.ranks)

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return max((attempt.restart_count for attempt in self.attempts), default=0)

    @cached_property
    def begin_epoch_ns(self) -> int:
        """The first event of the first rank; 0 for a run without events."""
        return min(
            (attempt.epoch_ns(attempt.first_mono_ns) for attempt in self.attempts), default=0
        )

    @cached_property
    def end_epoch_ns(self) -> int:
        return max((attempt.epoch_ns(attempt.last_mono_ns) for attempt in self.attempts), default=0)

    @property
    def observed_s(self) -> float:
        """From the first event to the last. Training before and after them leaves no trace."""
        return (self.end_epoch_ns - self.begin_epoch_ns) / 1e9

    def begin_s(self, attempt: Attempt) -> float:
        """The first event of an attempt, in seconds since the run's first event."""
        return self.since_begin_s(attempt, attempt.first_mono_ns)

    def since_begin_s(self, attempt: Attempt, mono_ns: int) -> float:
        """A stamp of an attempt, in seconds since the run's first event."""
        return (attempt.epoch_ns(mono_ns) - self.begin_epoch_ns) / 1e9


class Summary(TypedDict):
    """The distribution of one latency.

    Attributes:
        count: values that were measured. With 0 the others are absent.
        p50: median, by nearest rank: a value that was measured.
        p99: 99th percentile; of fewer than 100 values the largest.
        max: largest.
    """

    count: int
    p50: NotRequired[float]
    p99: NotRequired[float]
    max: NotRequired[float]


def summary(values: Iterable[float | None]) -> Summary:
    """Count, p50, p99 and max of the values that are known."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return {"count": 0}
    return {
        "count": len(known),
        "p50": percentile(known, 50),
        "p99": percentile(known, 99),
        "max": known[-1],
    }


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The nearest-rank percentile of at least one value in ascending order."""
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


# --- the latencies of a run, declared once for tables, histograms and summaries -------------------

Kind = Literal["pause", "nsys", "save", "stop"]

_UNITS = {"us": ("µs", 1e-6), "ms": ("ms", 1e-3), "s": ("s", 1.0)}


class Latency(NamedTuple):
    """One latency.

    Attributes:
        kind: what has it.
        key: its name in ``figures.json``; the suffix is its unit.
        label: the two moments.
        spec: how a value is printed.
    """

    kind: Kind
    key: str
    label: str
    spec: str

    @property
    def unit(self) -> str:
        return _UNITS[self.key.rpartition("_")[2]][0]

    def measured_s(self, history: History) -> list[float]:
        """The values that the event log holds, in seconds, smallest first."""
        moments: dict[str, Sequence[object]]
        moments = {"pause": history.pauses, "save": history.saves, "stop": history.stops}
        unit_s = _UNITS[self.key.rpartition("_")[2]][1]
        values = (getattr(one, self.key, None) for one in moments.get(self.kind, ()))
        return sorted(value * unit_s for value in values if value is not None)


LATENCIES = (
    Latency("pause", "park_us", "signal → parked", ",.0f"),
    Latency("pause", "all_parked_us", "signal → all ranks parked", ",.0f"),
    Latency("pause", "drain_us", "parked → devices idle", ",.0f"),
    Latency("pause", "parked_s", "parked", ",.3f"),
    Latency("pause", "resume_us", "resume → running", ",.0f"),
    Latency("nsys", "park_us", "signal → parked", ",.0f"),
    Latency("nsys", "last_kernel_us", "signal → last kernel's end", ",.0f"),
    Latency("nsys", "resume_us", "resume → running", ",.0f"),
    Latency("nsys", "first_kernel_us", "resume → first kernel", ",.0f"),
    Latency("nsys", "difference_us", "difference to the log, at most", ",.0f"),
    Latency("save", "save_ms", "start → committed", ",.1f"),
    Latency("stop", "safe_point_ms", "signal → safe point", ",.1f"),
    Latency("stop", "written_ms", "signal → files written", ",.1f"),
    Latency("stop", "durable_ms", "signal → committed", ",.1f"),
    Latency("stop", "requeued_ms", "signal → requeued", ",.1f"),
    Latency("stop", "eligible_s", "end → eligible", ",.0f"),
    Latency("stop", "queued_s", "eligible → started", ",.0f"),
    Latency("stop", "start_s", "started → first event", ",.1f"),
    Latency("stop", "waited_s", "end → next attempt", ",.2f"),
    Latency("stop", "first_step_s", "next attempt → first step", ",.2f"),
)
