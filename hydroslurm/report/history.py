"""Read a run folder into a :class:`History`, from which figures, table and picture are made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hydroslurm.core.files import clean
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.clocks import Alignment, align
from hydroslurm.report.crowd import in_shares
from hydroslurm.report.lines import Line, Unread, read_lines
from hydroslurm.report.lives import lives_in
from hydroslurm.report.pauses import Life, Pause, StopRequest
from hydroslurm.report.stops import Stop, Stopped, stops_of

_MOST_RANKS = 100_000
"""A number beyond is damage."""


@dataclass(frozen=True)
class History:
    """Everything that happened in one run, all ranks and all lives.

    Attributes:
        events: lines that were read.
        missing: what could not be read, in sentences.
        alignment: how the clocks of lives and hosts were lined up.
    """

    name: str
    lives: tuple[Life, ...] = ()
    events: int = 0
    missing: tuple[str, ...] = ()
    alignment: Alignment = field(default_factory=Alignment)

    @cached_property
    def pauses(self) -> tuple[Pause, ...]:
        """In order of rank, then of time."""
        return tuple(pause for life in self.lives for pause in life.pauses)

    @property
    def stop_requests(self) -> tuple[StopRequest, ...]:
        """All of them: two for one preemption are normal."""
        return tuple(stop for life in self.lives for stop in life.stops)

    @cached_property
    def stopped(self) -> tuple[Stopped, ...]:
        """The stops with their lives, in order of rank, then of time."""
        return stops_of(self.lives)

    @property
    def stops(self) -> tuple[Stop, ...]:
        return tuple(stopped.stop for stopped in self.stopped)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._by_rank)

    def lives_of(self, rank: int) -> tuple[Life, ...]:
        """The lives of one rank, in order of time."""
        return self._by_rank.get(rank, ())

    @cached_property
    def _by_rank(self) -> dict[int, tuple[Life, ...]]:
        found: dict[int, list[Life]] = {}
        for life in self.lives:
            found.setdefault(life.rank, []).append(life)
        return {rank: tuple(lives) for rank, lives in sorted(found.items())}

    @property
    def job_ids(self) -> tuple[int, ...]:
        return tuple(sorted({life.job_id for life in self.lives if isinstance(life.job_id, int)}))

    def life_number(self, life: Life) -> int:
        """1 for the first life of its rank."""
        return self._numbers[id(life)]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """By identity: a life holds all its pauses, which would be compared one by one."""
        by_rank = self._by_rank.values()
        return {id(life): n for lives in by_rank for n, life in enumerate(lives, start=1)}

    @property
    def several_lives(self) -> bool:
        """Whether any rank has lived more than once: requeued, or started again by hand."""
        return len(self.lives) > len(self.ranks)

    @property
    def restarts(self) -> int:
        """How often the job was requeued."""
        return max((life.restart_count for life in self.lives), default=0)

    @cached_property
    def begin_epoch_ns(self) -> int:
        """The first event of the first rank; 0 for a run without events."""
        return min((life.epoch_ns(life.first_mono_ns) for life in self.lives), default=0)

    @cached_property
    def end_epoch_ns(self) -> int:
        return max((life.epoch_ns(life.last_mono_ns) for life in self.lives), default=0)

    @property
    def observed_s(self) -> float:
        """From the first event to the last. Training before and after them leaves no trace."""
        return (self.end_epoch_ns - self.begin_epoch_ns) / 1e9

    def begin_s(self, life: Life) -> float:
        """The first event of a life, in seconds since the run's first event."""
        return self.since_begin_s(life, life.first_mono_ns)

    def since_begin_s(self, life: Life, mono_ns: int) -> float:
        """A stamp of a life, in seconds since the run's first event."""
        return (life.epoch_ns(mono_ns) - self.begin_epoch_ns) / 1e9


def read_history(folder: Path) -> History:
    """Read all event files of a run folder; lines that are torn or foreign are passed over.

    Raises:
        RunFolderError: the folder is missing, is not a run folder or cannot be read.
    """
    run_dir = RunDir(folder)
    _check(run_dir)
    try:
        files = list(run_dir.rank_event_files().values())
        parts = in_shares(files, _read)
        failed = [error for part in parts for error in part.failed]
        if failed and len(failed) == len(files):
            raise failed[0]
    except OSError as error:
        raise RunFolderError(
            f"cannot read {error.filename}: {error.strerror}. "
            "A run folder is its owner's (0700): run this as that user"
        ) from error
    lives = sorted((life for part in parts for life in part.lives), key=lambda life: life.rank)
    aligned, alignment = align(lives)
    said = sorted((s for part in parts for s in part.sentences), key=lambda one: one[0])
    return History(
        clean(folder.resolve().name),
        aligned,
        events=sum(part.events for part in parts),
        missing=(*(words for _, words in said), *_ranks_missing(aligned), *_unheard(aligned)),
        alignment=alignment,
    )


@dataclass(frozen=True)
class _Part:
    """What some of the files hold; each sentence with the rank that it is about; and why some could
    not be read."""

    lives: tuple[Life, ...]
    events: int
    sentences: tuple[tuple[int, str], ...]
    failed: tuple[OSError, ...]


def _read(files: Sequence[Path]) -> _Part:
    reading = _Reading()
    lives = lives_in(reading.lines(files))
    return _Part(lives, reading.events, tuple(reading.sentences()), tuple(reading.failed.values()))


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


def _ranks_missing(lives: Iterable[Life]) -> Iterator[str]:
    """Ranks that others were joined with, and that wrote nothing."""
    seen, wanted = set(), 0
    for life in lives:
        seen.add(life.rank)
        wanted = max(wanted, life.world_size)
    absent = sorted(set(range(wanted)) - seen) if wanted <= _MOST_RANKS else []
    if absent:
        which = ", ".join(map(str, absent[:10])) + (" ..." if len(absent) > 10 else "")
        yield f"Of {wanted} ranks {len(absent)} left no events: {which}."


def _unheard(lives: Iterable[Life]) -> Iterator[str]:
    """Signals that somebody else took: what they asked for left no event."""
    found: dict[tuple[str, ...], dict[int, None]] = {}
    for life in lives:
        if life.lost_signals:
            found.setdefault(life.lost_signals, {})[life.rank] = None
    for signals, ranks in found.items():
        which = ", ".join(map(str, list(ranks)[:10])) + (" ..." if len(ranks) > 10 else "")
        yield (
            f"Rank{'' if len(ranks) == 1 else 's'} {which}: other code replaced hydroslurm's "
            f"handlers of {', '.join(signals)}: pauses and stops that were asked for with them "
            "while they were lost were not heard, and are not in this report."
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
