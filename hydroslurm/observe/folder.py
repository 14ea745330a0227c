"""Follow a run folder: its ranks' files, the heartbeat, and where needed what is older than the end
of those."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.checkpoint import folders
from hydroslurm.core.heartbeat import Heartbeat, read_heartbeat
from hydroslurm.core.rankstate import RankState
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.observe.rankfile import RankFile
from hydroslurm.training.attempts import AttemptLog


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts in a run folder about the present attempt of its job.

    Attributes:
        ranks: of this attempt, in order of rank.
        n_ranks: how many there are: those that wrote, or that those are joined with.
        has_run: whether a ``Run`` will save when it is asked to stop; None: not known.
        began: the step that the attempt began at, and when (epoch ns).
        commit: newest durable checkpoint of any attempt: step, when (epoch ns).
        save_s: the longest durable save that was seen; None before the first.
        step: newest that is known.
        step_epoch_ns: when that was told.
        steps_per_s: as last measured; None when not known.
        stuck_s: so long it had been at that step when it told.
        told_every_s: it tells so often; None where only events do.
        finished: the training is done.
    """

    ranks: tuple[RankState, ...] = ()
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
    finished: bool = False

    @property
    def parked(self) -> int:
        return sum(rank.state == "parked" for rank in self.ranks)

    @property
    def stopping(self) -> bool:
        return any(rank.state == "stopping" for rank in self.ranks)


class FollowedRun:
    """Follows one run folder. Costs two ``stat`` and one per rank as long as nothing is written."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self._files: dict[int, RankFile] = {}
        self._listed_ns = -1
        self._heartbeat: Heartbeat | None = None
        self._heartbeat_ns = -1
        self._older_attempt: tuple[int, tuple[int, int] | None] | None = None
        self._older_commit: tuple[tuple[int, int] | None] | None = None

    def read(self, *, budget_bytes: int) -> int:
        """Read what is new, at most so much; returns how much that was."""
        self._list()
        left = budget_bytes
        for file in self._files.values():
            left -= file.read(budget_bytes=left)
        changed_ns = _changed_ns(self.run.heartbeat_json)
        if changed_ns not in (-1, self._heartbeat_ns):
            self._heartbeat_ns = changed_ns
            self._heartbeat = read_heartbeat(self.run.heartbeat_json)
        return budget_bytes - left

    def facts(self, restart_count: int) -> RunFacts:
        """Return the facts of the attempt with that restart count."""
        mine = [f for f in self._files.values() if f.facts.state is not None]
        ranks = tuple(
            state
            for file in mine
            if (state := file.facts.state) and state.restart_count == restart_count
        )
        if not mine:
            return RunFacts()
        began = self._began(mine, restart_count)
        step, epoch_ns, rate, stuck_s = self._step(mine, restart_count)
        whole = all(file.facts.whole for file in mine)
        beats = self._heartbeat is not None and self._heartbeat.restart_count == restart_count
        return RunFacts(
            ranks=ranks,
            n_ranks=max([len(ranks), *(rank.world_size for rank in ranks)]),
            has_run=True if began else (False if whole and ranks else None),
            began=began,
            commit=self._commit(mine),
            save_s=max((f.facts.save_s for f in mine if f.facts.save_s is not None), default=None),
            step=step,
            step_epoch_ns=epoch_ns,
            steps_per_s=rate,
            stuck_s=stuck_s,
            told_every_s=self._heartbeat.every_s if self._heartbeat and beats else None,
            finished=any(file.facts.finished for file in mine),
        )

    def _list(self) -> None:
        """Look for new ranks' files where the folder has changed; the heartbeat changes none."""
        changed_ns = _changed_ns(self.run.events)
        if changed_ns in (-1, self._listed_ns):
            return
        self._listed_ns = changed_ns
        try:
            found = self.run.rank_event_files()
        except OSError:
            return
        for rank, path in found.items():
            self._files.setdefault(rank, RankFile(path))
        self._files = dict(sorted(self._files.items()))

    def _began(self, mine: list[RankFile], restart_count: int) -> tuple[int, int] | None:
        attempts = (file.facts.attempt for file in mine)
        told = min(
            (attempt[1:] for attempt in attempts if attempt and attempt[0] == restart_count),
            default=None,
        )
        if told is not None or all(file.facts.whole for file in mine):
            return told
        if self._older_attempt is None or self._older_attempt[0] != restart_count:
            self._older_attempt = (restart_count, _attempt_in(self.run, restart_count))
        return self._older_attempt[1]

    def _commit(self, mine: list[RankFile]) -> tuple[int, int] | None:
        told = max((f.facts.commit for f in mine if f.facts.commit), default=None)
        if told is not None or all(file.facts.whole for file in mine):
            return told
        if self._older_commit is None:
            self._older_commit = (_newest_checkpoint(self.run),)
        return self._older_commit[0]

    def _step(
        self, mine: list[RankFile], restart_count: int
    ) -> tuple[int | None, int | None, float | None, float]:
        marks = max((f.facts.marks for f in mine), key=lambda m: m[-1][1] if m else 0)
        marks = [mark for mark in marks if mark[2] == restart_count]
        newest = marks[-1][:2] if marks else None
        beat = self._heartbeat
        if beat is not None and beat.restart_count == restart_count:
            states = (file.facts.state for file in mine)
            host = next((state.host for state in states if state and state.pid == beat.pid), "")
            beat = beat.dated_now(host)
            if newest is not None and newest[0] > beat.step and newest[1] > beat.epoch_ns:
                return *newest, beat.steps_per_s, 0.0
            stuck_s = max(0.0, (beat.epoch_ns - beat.since_epoch_ns) / 1e9)
            return beat.step, beat.epoch_ns, beat.steps_per_s, stuck_s
        if newest is None:
            return None, None, None, 0.0
        rate, (first, since_ns, _) = None, marks[0]
        if newest[1] > since_ns:
            rate = max(0.0, (newest[0] - first) / ((newest[1] - since_ns) / 1e9))
        return *newest, rate, 0.0


def _changed_ns(path: Path) -> int:
    """Return when it last changed; -1 where that cannot be read."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


def _attempt_in(run: RunDir, restart_count: int) -> tuple[int, int] | None:
    """Look up in attempts.jsonl an attempt that began too far back in the events."""
    try:
        attempts = AttemptLog(run.attempts_jsonl).attempts()
    except RunFolderError:
        return None
    for attempt in reversed(attempts):
        if attempt.restart_count == restart_count:
            return attempt.step, attempt.began_epoch_ns
    return None


def _newest_checkpoint(run: RunDir) -> tuple[int, int] | None:
    """The newest committed checkpoint by its name, and when it was written (epoch ns)."""
    try:
        with os.scandir(run.checkpoints) as entries:
            steps = {
                step: entry
                for entry in entries
                if (step := folders.step_of(entry.name)) is not None
            }
            if not steps:
                return None
            step = max(steps)
            return step, steps[step].stat().st_mtime_ns
    except OSError:
        return None
