"""All attempts, pauses and stops of a run: the source of figures, tables and pictures.

:mod:`~hydroslurm.report.reading` builds it from a run folder. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal

from msgspec import Meta
from typing_extensions import NotRequired, TypedDict

from hydroslurm.report.attempts import Attempt, StopRequest
from hydroslurm.report.clocks import Alignment
from hydroslurm.report.pauses import Pause, Profiled
from hydroslurm.report.progress import Save
from hydroslurm.report.stops import Stop, Stopped, stops_of
from hydroslurm.report.tables import Latency, latencies_of


@dataclass(frozen=True)
class History:
    """All events of one run, over all ranks and attempts.

    Attributes:
        events: number of lines read.
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
        """By rank, then time."""
        return tuple(pause for attempt in self.attempts for pause in attempt.pauses)

    @property
    def saves(self) -> tuple[Save, ...]:
        """By rank, then time."""
        return tuple(save for attempt in self.attempts for save in attempt.progress.saves)

    @property
    def stop_requests(self) -> tuple[StopRequest, ...]:
        """All stop requests; two per preemption are normal."""
        return tuple(stop for attempt in self.attempts for stop in attempt.stops)

    @cached_property
    def stopped(self) -> tuple[Stopped, ...]:
        """The stops with their attempts, by rank, then time."""
        return stops_of(self.attempts)

    @property
    def stops(self) -> tuple[Stop, ...]:
        return tuple(stopped.stop for stopped in self.stopped)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._by_rank)

    def attempts_of(self, rank: int) -> tuple[Attempt, ...]:
        """Return the attempts of one rank, in order of time."""
        return self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Attempt, ...]]:
        by_rank: dict[int, list[Attempt]] = {}
        for attempt in self.attempts:
            by_rank.setdefault(attempt.rank, []).append(attempt)
        return {rank: tuple(attempts) for rank, attempts in sorted(by_rank.items())}

    @property
    def job_ids(self) -> tuple[int, ...]:
        return tuple(
            sorted({attempt.job_id for attempt in self.attempts if isinstance(attempt.job_id, int)})
        )

    def attempt_number(self, attempt: Attempt) -> int:
        """Return the attempt's number within its rank, from 1."""
        return self._numbers[id(attempt)]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """Keyed by identity: comparing attempts would compare all their pauses."""
        by_rank = self._by_rank.values()
        return {
            id(attempt): n for attempts in by_rank for n, attempt in enumerate(attempts, start=1)
        }

    @property
    def several_attempts(self) -> bool:
        """Whether any rank started more than once: requeued, or restarted by hand."""
        return len(self.attempts) > len(self.ranks)

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return max((attempt.restart_count for attempt in self.attempts), default=0)

    @cached_property
    def begin_epoch_ns(self) -> int:
        """First event of the first rank; 0 for a run without events."""
        return min(
            (attempt.epoch_ns(attempt.first_mono_ns) for attempt in self.attempts), default=0
        )

    @cached_property
    def end_epoch_ns(self) -> int:
        return max((attempt.epoch_ns(attempt.last_mono_ns) for attempt in self.attempts), default=0)

    @property
    def observed_s(self) -> float:
        """Time from the first to the last event. Training outside of it leaves no trace."""
        return (self.end_epoch_ns - self.begin_epoch_ns) / 1e9

    def begin_s(self, attempt: Attempt) -> float:
        """Return an attempt's first event, in seconds since the run's first event."""
        return self.since_begin_s(attempt, attempt.first_mono_ns)

    def since_begin_s(self, attempt: Attempt, mono_ns: int) -> float:
        """Convert an attempt's stamp to seconds since the run's first event."""
        return (attempt.epoch_ns(mono_ns) - self.begin_epoch_ns) / 1e9


class Summary(TypedDict):
    """The distribution of one latency."""

    count: Annotated[
        int, Meta(description="Values that were measured. With 0 the others are absent.")
    ]
    p50: NotRequired[
        Annotated[float, Meta(description="Median, by nearest rank: a value that was measured.")]
    ]
    p99: NotRequired[
        Annotated[float, Meta(description="99th percentile; of fewer than 100 values the largest.")]
    ]
    max: NotRequired[Annotated[float, Meta(description="Largest.")]]


def summary(values: Iterable[float | None]) -> Summary:
    """Summarize the known values: count, p50, p99 and max."""
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
    """Return the nearest-rank percentile of at least one value in ascending order."""
    return ordered[max(0, math.ceil(percent * len(ordered) / 100) - 1)]


Kind = Literal["pause", "nsys", "save", "stop"]
LATENCIES: Mapping[Kind, tuple[Latency, ...]] = {
    "pause": latencies_of(Pause),
    "nsys": latencies_of(Profiled),
    "save": (Latency("save_ms", "start → committed", ",.1f"),),
    "stop": latencies_of(Stop),
}
"""Latencies whose distribution is shown, for tables and histograms."""
