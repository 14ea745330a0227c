"""The run folders of a job, and what the ranks and an elastic run's coordinator have last told in
one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from hydroslurm.core import rundir
from hydroslurm.core.goodput import Goodput
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, load_status
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import UntrustedFile
from hydroslurm.slurm.run_folders import run_dirs_of
from hydroslurm.slurm.values import Job

SLOW_FACTOR = 1.25
SLOW_SHARE = 0.1
"""A rank is slow if it reaches its first collective this many times later than the others' median,
by at least this share of the step: for less, two equal ranks differ by chance."""


class SlowRank(NamedTuple):
    """A rank the others wait for, and how much later it arrives."""

    rank: int
    host: str
    factor: float

    @property
    def message(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        return f"{where} reaches its first collective {self.factor:.1f}x later than the median"

    @property
    def cell(self) -> str:
        return f"r{self.rank} {self.factor:.1f}x"


def slow_ranks(ranks: Iterable[RankStatus]) -> tuple[SlowRank, ...]:
    """Return one training's slow ranks, slowest first. Of two ranks the faster is the median."""
    running = [rank for rank in ranks if rank.state == "running" and rank.first_collective_s]
    times_s = [rank.first_collective_s or 0.0 for rank in running]
    median_s = statistics.median_low(times_s) if times_s else 0.0
    slow = [
        SlowRank(rank.rank, rank.host, time_s / median_s)
        for rank, time_s in zip(running, times_s, strict=True)
        if time_s > SLOW_FACTOR * median_s
        and (time_s - median_s) * (rank.steps_per_s or 0.0) > SLOW_SHARE
    ]
    return tuple(sorted(slow, key=lambda rank: -rank.factor))


_Version = tuple[int, int, int]


@dataclass(frozen=True)
class Training:
    """The ranks of one run folder at one moment; :meth:`read` gives the next.

    Attributes:
        statuses: rank -> its status, in whichever attempt it wrote that; in order of rank.
        unread: rank -> why its status file cannot be read.
        problem: why the folder cannot be looked at.
        elastic: what the coordinator of an elastic run has told; None of other runs, and where
            another user has written it.
    """

    run: RunDir
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    unread: Mapping[int, str] = field(default_factory=dict)
    problem: str | None = None
    elastic: Mapping[str, Any] | None = None
    _versions: Mapping[int, _Version] = field(default_factory=dict)
    _elastic_ns: int | None = None

    def read(self) -> Training:
        """Look again; returns itself if nothing has changed. An unchanged file costs one stat."""
        elastic_ns, elastic = self._read_elastic()
        try:
            files = self.run.rank_status_names()
        except OSError as error:
            problem = f"{self.run.events}: {error.strerror}"
            return replace(self, problem=problem, elastic=elastic, _elastic_ns=elastic_ns)
        versions: dict[int, _Version] = {}
        for rank, path in files.items():
            try:
                now = os.lstat(path)
            except OSError:
                continue
            versions[rank] = now.st_ino, now.st_mtime_ns, now.st_size
        if (versions, elastic_ns, None) == (self._versions, self._elastic_ns, self.problem):
            return self
        statuses: dict[int, RankStatus] = {}
        unread: dict[int, str] = {}
        for rank, version in versions.items():
            if self._versions.get(rank) == version:
                if rank in self.statuses:
                    statuses[rank] = self.statuses[rank]
                else:
                    unread[rank] = self.unread[rank]
                continue
            try:
                statuses[rank] = load_status(files[rank])
            except OSError as error:
                unread[rank] = f"its status cannot be read: {error.strerror}"
            except ValueError as error:
                unread[rank] = str(error)
        return Training(self.run, statuses, unread, None, elastic, versions, elastic_ns)

    def _read_elastic(self) -> tuple[int | None, Mapping[str, Any] | None]:
        folder = ElasticFolder(run=self.run.root)
        try:
            changed_ns = os.lstat(folder.status_json).st_mtime_ns
            if changed_ns == self._elastic_ns:
                return changed_ns, self.elastic
            return changed_ns, folder.read(folder.status_json)
        except OSError:
            return None, None
        except UntrustedFile:
            return changed_ns, None

    def ranks(self, restart_count: int) -> tuple[RankStatus, ...]:
        """Those that belong to the attempt with that restart count."""
        return self._by_attempt.get(restart_count, ())

    @cached_property
    def _by_attempt(self) -> Mapping[int, tuple[RankStatus, ...]]:
        counts = {rank.restart_count for rank in self.statuses.values()}
        return {
            count: tuple(rank for rank in self.statuses.values() if rank.restart_count == count)
            for count in counts
        }

    def began(self, restart_count: int) -> tuple[int, int] | None:
        """Step and moment (epoch ns) at which that attempt's Run began; None without one."""
        return min(
            (
                (rank.attempt_step or 0, rank.attempt_began.epoch_ns)
                for rank in self.statuses.values()
                if rank.attempt_began and rank.attempt_restart_count == restart_count
            ),
            default=None,
        )

    @cached_property
    def commit(self) -> tuple[int, int] | None:
        """Step and moment (epoch ns) of the newest durable checkpoint of any attempt."""
        return max(
            (
                (rank.committed_step, rank.committed.epoch_ns)
                for rank in self.statuses.values()
                if rank.committed_step is not None and rank.committed
            ),
            default=None,
        )

    @property
    def save_s(self) -> float | None:
        """The longest durable save so far; None before the first."""
        known = (rank.save_s for rank in self.statuses.values() if rank.save_s is not None)
        return max(known, default=None)

    @cached_property
    def goodput(self) -> Goodput | None:
        """Of all attempts; None if its first rank does not tell it."""
        first = next(iter(self.statuses.values()), None)
        return None if first is None else first.goodput()

    @property
    def size(self) -> tuple[int, int, int] | None:
        """An elastic run's members that train now, that are wanted, and at most."""
        now, wanted, most = (self._elastic_count(name) for name in ("size", "wanted", "max"))
        return None if now is None or wanted is None or most is None else (now, wanted, most)

    @property
    def elastic_step(self) -> int | None:
        return self._elastic_count("step")

    def _elastic_count(self, name: str) -> int | None:
        value = (self.elastic or {}).get(name)
        return value if type(value) is int else None


# --- which folders a job has ----------------------------------------------------------------------


def run_dir_of(job: Job) -> RunDir:
    """The run folder of a job, whether it was started by ``hydroslurm submit`` or by srun alone; of
    several trainings, that of the one which was last at work."""
    return newest_of(run_dirs_of(job))


def newest_of(folders: Sequence[RunDir]) -> RunDir:
    """The one of these run folders whose training was last at work."""
    return folders[0] if len(folders) == 1 else max(folders, key=_last_told_ns)


def _last_told_ns(run: RunDir) -> int:
    try:
        return run.rank_status(0).stat().st_mtime_ns
    except OSError:
        return 0


def member_of(job: Job) -> tuple[RunDir, str] | None:
    """The elastic run that this array element is a member of, and the member's name; None of any
    other job."""
    run = rundir.elastic_run_of(job.comment)
    return None if run is None or job.array_task_id is None else (run, str(job.id))


def ranks_dirs_of(job: Job) -> tuple[RunDir, ...]:
    """Where the ranks of all its trainings write: its run folders, or its member's part of that of
    an elastic run."""
    if (member := member_of(job)) is not None:
        run, name = member
        return (RunDir(run.elastic / "members" / name),)
    return run_dirs_of(job)


def ranks_dir_of(job: Job) -> RunDir:
    """The same of the training that was last at work."""
    return newest_of(ranks_dirs_of(job))
