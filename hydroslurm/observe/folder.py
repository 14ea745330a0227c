"""Follow the run folders of a job: its ranks' statuses."""

from __future__ import annotations

import os
import stat
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hydroslurm.core.goodput import Goodput
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import PAUSE_BOUNDS_S, RankStatus, read_status
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.errors import UntrustedFile

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


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts from a job's run folders about its current attempt. With several trainings, facts that
    do not cover all ranks are those of the oldest checkpoint's, which would lose most.

    Attributes:
        ranks: of this attempt, by rank.
        n_ranks: all ranks: those that wrote, or that those are joined with.
        has_run: whether a ``Run`` will save at a stop; None: unknown.
        began: step at the attempt's begin, and when (epoch ns).
        commit: newest durable checkpoint of any attempt: step, when (epoch ns).
        save_s: longest durable save so far; None before the first.
        step: of the first rank that reports one.
        step_epoch_ns: when it reported that.
        steps_per_s: last measured; None if unknown.
        stuck_s: how long it had been at that step by then.
        told_every_s: interval of its reports; None if only events report.
        size: members of an elastic run that train now, that are wanted, and at most.
        pause_counts, pause_sum_s: of all ranks and attempts, as in
            :class:`~hydroslurm.core.status.RankStatus`.
        slow: ranks the others wait for.
        goodput: of all attempts; None if the first rank does not report it.
    """

    ranks: tuple[RankStatus, ...] = ()
    n_ranks: int = 0
    has_run: bool | None = None
    began: tuple[int, int] | None = None
    commit: tuple[int, int] | None = None
    save_s: float | None = None
    step: int | None = None
    step_epoch_ns: int | None = None
    steps_per_s: float | None = None
    stuck_s: float = 0.0
    told_every_s: float | None = None
    size: tuple[int, int, int] | None = None
    pause_counts: tuple[int, ...] = (0,) * (len(PAUSE_BOUNDS_S) + 1)
    pause_sum_s: float = 0.0
    slow: tuple[SlowRank, ...] = ()
    goodput: Goodput | None = None

    @property
    def parked(self) -> int:
        return sum(rank.state == "parked" for rank in self.ranks)

    @property
    def vacated_bytes(self) -> int:
        """Device memory of all ranks that is on their hosts."""
        return sum(rank.vacated_bytes for rank in self.ranks)

    @property
    def stopping(self) -> bool:
        return any(rank.state == "stopping" for rank in self.ranks)


def size_of(status: Mapping[str, Any]) -> tuple[int, int, int] | None:
    """Return an elastic run's members that train now, that are wanted, and at most."""
    now, wanted, most = (status.get(name) for name in ("size", "wanted", "max"))
    if type(now) is int and type(wanted) is int and type(most) is int:
        return now, wanted, most
    return None


def facts_of(runs: Sequence[FollowedRun], restart_count: int) -> RunFacts:
    """Return the facts of a job's attempt with that restart count, of all running trainings; if
    none runs, of the last."""
    all_facts = [run.facts(restart_count) for run in runs]
    living = [f for f in all_facts if any(rank.state != "ended" for rank in f.ranks)]
    if len(living) < 2:
        return living[0] if living else all_facts[-1]
    lead = min(living, key=lambda facts: (facts.commit or facts.began or (0, 0))[1])
    counts = zip(*(facts.pause_counts for facts in living), strict=True)
    return replace(
        lead,
        ranks=tuple(rank for facts in living for rank in facts.ranks),
        n_ranks=sum(facts.n_ranks for facts in living),
        slow=tuple(slow for facts in living for slow in facts.slow),
        pause_counts=tuple(map(sum, counts)),
        pause_sum_s=sum(facts.pause_sum_s for facts in living),
    )


class FollowedRun:
    """Follows one run folder; an unchanged file costs one ``stat``."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._seen: dict[int, tuple[tuple[int, int, int], RankStatus | None]] = {}
        self._facts: tuple[int, RunFacts] | None = None
        self._elastic = ElasticFolder(run=run.root)
        self._elastic_ns = 0
        self._status: dict[str, Any] | None = None

    def read(self) -> int:
        """Read new statuses; return how many."""
        self._read_elastic()
        try:
            files = self.run.rank_status_names()
        except OSError:
            return 0
        count = 0
        for rank, path in files.items():
            try:
                now = os.lstat(path)
            except OSError:
                continue
            version = (now.st_ino, now.st_mtime_ns, now.st_size)
            known = self._seen.get(rank)
            if not stat.S_ISREG(now.st_mode) or (known is not None and known[0] == version):
                continue
            self._seen[rank] = version, read_status(path)
            self._facts = None
            count += 1
        return count

    def _read_elastic(self) -> None:
        try:
            changed_ns = os.lstat(self._elastic.status_json).st_mtime_ns
        except OSError:
            return
        if changed_ns != self._elastic_ns:
            self._elastic_ns, self._facts = changed_ns, None
            try:
                self._status = self._elastic.read(self._elastic.status_json)
            except UntrustedFile:  # another user's: ignore it
                self._status = None

    def facts(self, restart_count: int) -> RunFacts:
        """Return the facts of the attempt with that restart count."""
        if self._facts is None or self._facts[0] != restart_count:
            facts = self._fold(restart_count)
            if self._status is not None:
                size, step = size_of(self._status), self._status.get("step")
                facts = replace(facts, size=size, step=step if type(step) is int else facts.step)
            self._facts = restart_count, facts
        return self._facts[1]

    def _fold(self, restart_count: int) -> RunFacts:
        known = [status for _, (_, status) in sorted(self._seen.items()) if status is not None]
        if not known:
            return RunFacts()
        ranks = tuple(status for status in known if status.restart_count == restart_count)
        begins = [
            (status.attempt_step or 0, status.attempt_began.epoch_ns)
            for status in known
            if status.attempt_began and status.attempt_restart_count == restart_count
        ]
        commits = [
            (status.committed_step, status.committed.epoch_ns)
            for status in known
            if status.committed_step is not None and status.committed
        ]
        lead = next((status for status in ranks if status.step is not None), None)
        since = lead.step_since if lead else None
        return RunFacts(
            ranks=ranks,
            n_ranks=max([len(ranks), *(rank.world_size for rank in ranks)]),
            has_run=True if begins else (False if ranks else None),
            began=min(begins, default=None),
            commit=max(commits, default=None),
            save_s=max((s.save_s for s in known if s.save_s is not None), default=None),
            step=lead.step if lead else None,
            step_epoch_ns=lead.as_of.epoch_ns if lead else None,
            steps_per_s=lead.steps_per_s if lead else None,
            stuck_s=max(0.0, (lead.as_of.epoch_ns - since.epoch_ns) / 1e9) if lead and since else 0,
            told_every_s=lead.heartbeat_s if lead else None,
            pause_counts=tuple(map(sum, zip(*(s.pause_counts for s in known), strict=True))),
            pause_sum_s=sum(s.pause_sum_s for s in known),
            slow=slow_ranks(ranks),
            goodput=known[0].goodput(),
        )
