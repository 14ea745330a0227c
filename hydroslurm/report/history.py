"""Read a run folder into a :class:`History`, from which figures, tables and pictures are made."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from typing_extensions import NotRequired, TypedDict

from hydroslurm.core.files import clean
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.attempts import Attempt, StopRequest, attempts_in
from hydroslurm.report.clocks import Alignment, align
from hydroslurm.report.lines import Line, Unread, read_lines
from hydroslurm.report.parallel import parallel_map
from hydroslurm.report.pauses import Pause
from hydroslurm.report.stops import Stop, Stopped, stops_of

_MOST_RANKS = 100_000
"""A larger number is damage."""
_PARALLEL_BYTES = 16 * 2**20
"""Below this, forking and handing results back costs more than it saves."""


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


def read_history(folder: Path) -> History:
    """Read all event files of a run folder; lines that are torn or foreign are passed over.

    Raises:
        RunFolderError: the folder is missing, is not a run folder or cannot be read.
    """
    run_dir = RunDir(folder)
    _check(run_dir)
    try:
        files = list(run_dir.rank_event_files().values())
        parts = _read_all(files)
        failed = [error for part in parts for error in part.failed]
        if failed and len(failed) == len(files):
            raise failed[0]
    except OSError as error:
        raise RunFolderError(
            f"cannot read {error.filename}: {error.strerror}. "
            "A run folder is its owner's (0700): run this as that user"
        ) from error
    attempts = sorted(
        (attempt for part in parts for attempt in part.attempts), key=lambda attempt: attempt.rank
    )
    aligned, alignment = align(attempts)
    found = sorted((s for part in parts for s in part.sentences), key=lambda one: one[0])
    return History(
        clean(folder.resolve().name),
        aligned,
        events=sum(part.events for part in parts),
        missing=(
            *(sentence for _, sentence in found),
            *_ranks_missing(aligned),
            *_lost_signals(aligned),
        ),
        alignment=alignment,
    )


def _read_all(files: Sequence[Path]) -> list[_Part]:
    """Large logs are read by as many processes as there are CPUs: a million lines take one half a
    minute, and the files of ranks need not be read in order."""
    sizes = {path: path.lstat().st_size for path in files}
    count = min(len(os.sched_getaffinity(0)), len(files))
    if count < 2 or sum(sizes.values()) < _PARALLEL_BYTES:
        return [_read(files)]
    shares: list[list[Path]] = [[] for _ in range(count)]
    share_bytes = [0] * count
    for path in sorted(files, key=lambda path: sizes[path], reverse=True):
        smallest = share_bytes.index(min(share_bytes))
        shares[smallest].append(path)
        share_bytes[smallest] += sizes[path]
    others = parallel_map(_read, shares[1:])
    return [_read(shares[0]), *others]  # one share here: what it holds is not handed back


@dataclass(frozen=True)
class _Part:
    """What some of the files hold; each sentence with the rank that it is about; and why some could
    not be read."""

    attempts: tuple[Attempt, ...]
    events: int
    sentences: tuple[tuple[int, str], ...]
    failed: tuple[OSError, ...]


def _read(files: Sequence[Path]) -> _Part:
    reading = _Reading()
    attempts = attempts_in(reading.lines(files))
    return _Part(
        attempts, reading.events, tuple(reading.sentences()), tuple(reading.failed.values())
    )


class _Reading:
    """Counts what comes by."""

    def __init__(self) -> None:
        self.events = 0
        self.failed: dict[int, OSError] = {}
        self._unread: dict[int, Unread] = {}

    def lines(self, files: Sequence[Path]) -> Iterator[Line]:
        for path in files:
            rank = int(path.stem.rpartition("-")[2])
            unread = self._unread[rank] = Unread()
            try:
                for line in read_lines(path, unread):
                    self.events += 1
                    yield line
            except OSError as error:
                self.failed[rank] = OSError(error.errno, error.strerror, str(path))

    def sentences(self) -> Iterator[tuple[int, str]]:
        for rank, error in self.failed.items():
            yield rank, f"Rank {rank}: {error.filename} cannot be read: {error.strerror}."
        for rank, unread in self._unread.items():
            if unread.torn:
                yield rank, f"Rank {rank}: torn lines that were passed over: {unread.torn}."
            if unread.unknown:
                what = "lines of a later version of hydroslurm, passed over"
                yield rank, f"Rank {rank}: {what}: {unread.unknown}."


def _ranks_missing(attempts: Iterable[Attempt]) -> Iterator[str]:
    """Ranks that others were joined with, and that wrote nothing."""
    seen, wanted = set(), 0
    for attempt in attempts:
        seen.add(attempt.rank)
        wanted = max(wanted, attempt.world_size)
    absent = sorted(set(range(wanted)) - seen) if wanted <= _MOST_RANKS else []
    if absent:
        which = ", ".join(map(str, absent[:10])) + (" ..." if len(absent) > 10 else "")
        yield f"Of {wanted} ranks {len(absent)} left no events: {which}."


def _lost_signals(attempts: Iterable[Attempt]) -> Iterator[str]:
    """Signals whose handlers other code replaced: what they asked for left no event."""
    found: dict[tuple[str, ...], dict[int, None]] = {}
    for attempt in attempts:
        if attempt.lost_signals:
            found.setdefault(attempt.lost_signals, {})[attempt.rank] = None
    for signals, ranks in found.items():
        which = ", ".join(map(str, list(ranks)[:10])) + (" ..." if len(ranks) > 10 else "")
        yield (
            f"Rank{'' if len(ranks) == 1 else 's'} {which}: other code replaced hydroslurm's "
            f"handlers of {', '.join(signals)}: pauses and stops requested with them meanwhile "
            "had no effect, and are not in this report."
        )


def _check(run_dir: RunDir) -> None:
    """A job that has not started yet has no events, but it has a submission."""
    wanted = (run_dir.events, run_dir.submission_json)
    try:
        if any(path.exists() for path in wanted):
            return
    except OSError as error:
        raise RunFolderError(
            f"cannot read {error.filename}: {error.strerror}. "
            "A run folder is its owner's (0700): run this as that user"
        ) from error
    seen = "there is no such folder"
    if run_dir.root.is_dir():
        names = sorted(path.name for path in run_dir.root.iterdir())
        seen = (
            f"it holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            if names
            else "it is empty"
        )
    elif run_dir.root.exists():
        seen = "it is a file"
    raise RunFolderError(
        f"{run_dir.root} is not a run folder: {seen}. "
        f"Looked for events/{run_dir.rank_events(0).name} and {run_dir.submission_json.name}. "
        "Give the folder that `hydroslurm submit` printed, or the one that HYDROSLURM_RUN_DIR named"
    )


# --- statistics of what a history holds ---------------------------------------------------------


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
