"""Read a run folder into a :class:`History`, from which figures, table and picture are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hydroslurm.errors import RunFolderError
from hydroslurm.events import read_events
from hydroslurm.report.lives import lives_of
from hydroslurm.report.pauses import Life, Pause, StopRequest
from hydroslurm.report.stops import Stop, Stopped, stops_of
from hydroslurm.rundir import RunDir


@dataclass(frozen=True)
class History:
    """Everything that happened in one run, all ranks and all lives."""

    name: str
    lives: tuple[Life, ...] = ()

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
        return tuple(sorted({life.rank for life in self.lives}))

    def lives_of(self, rank: int) -> tuple[Life, ...]:
        """The lives of one rank, in order of time."""
        return tuple(life for life in self.lives if life.rank == rank)

    @property
    def job_ids(self) -> tuple[int, ...]:
        return tuple(sorted({life.job_id for life in self.lives if isinstance(life.job_id, int)}))

    def life_number(self, life: Life) -> int:
        """1 for the first life of its rank."""
        return 1 + self.lives_of(life.rank).index(life)

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
    files = run_dir.rank_event_files()
    try:
        lives = lives_of(event for path in files.values() for event in read_events(path))
    except OSError as error:
        raise RunFolderError(
            f"cannot read {error.filename}: {error.strerror}. "
            "A run folder is its owner's (0700): run this as that user"
        ) from error
    return History(name=folder.resolve().name, lives=lives)


def _check(run_dir: RunDir) -> None:
    """A job that has not started yet has no events, but it has a submission."""
    wanted = (run_dir.events, run_dir.submission_json)
    if any(path.exists() for path in wanted):
        return
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
