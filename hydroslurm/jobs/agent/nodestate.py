"""One state for a node, folded from the statuses of its ranks. Pure but for the reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.status import RankStatus, read_status, status_of
from hydroslurm.jobs.agent.workers import Meaning, Worker

WANTED: Mapping[Meaning, frozenset[str]] = {
    "slurm_pause": frozenset({"parked", "stopping", "ended"}),
    "user_pause": frozenset({"parked", "stopping", "ended"}),
    "slurm_resume": frozenset({"running", "parked", "stopping", "ended"}),
    "user_resume": frozenset({"running", "parked", "stopping", "ended"}),
    "stop": frozenset({"stopping", "ended"}),
    "warning": frozenset({"stopping", "ended"}),
}
"""A request is answered by a rank when it is in one of these states. A stop wins over a pause, and
a rank that goes on being held for another cause has answered a resume."""
_ENDED_CAUSE: Mapping[Meaning, str] = {"slurm_resume": "slurm", "user_resume": "user"}

SILENT = "silent"
"""The state of a worker that has announced nothing."""


@dataclass(frozen=True)
class NodeState:
    """Where a node is.

    Attributes:
        counts: how many workers are in which state, the states in order of the alphabet.
        since_epoch_ns: when the last of them entered its state; 0 where nobody has told.
        held_for: why ranks are held, all causes of all ranks.
    """

    counts: Mapping[str, int]
    since_epoch_ns: int = 0
    held_for: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """One word: the state that all share, else ``mixed``."""
        return next(iter(self.counts)) if len(self.counts) == 1 else "mixed"

    def answers(self, meaning: Meaning) -> bool:
        """Whether every worker does what was asked for."""
        ended = _ENDED_CAUSE.get(meaning)
        return set(self.counts) <= WANTED[meaning] and ended not in self.held_for

    def message(self) -> str:
        """``2 parked (slurm)``, for people."""
        counts = ", ".join(f"{count} {state}" for state, count in self.counts.items())
        return f"{counts} ({', '.join(self.held_for)})" if self.held_for else counts


def read(workers: Sequence[Worker]) -> NodeState:
    """The state of a node now."""
    return fold(statuses(workers))


def fold(states: Sequence[RankStatus | None]) -> NodeState:
    """One state of many; None stands for a worker that has announced nothing."""
    names = sorted(SILENT if state is None else state.state for state in states)
    known = [state for state in states if state is not None]
    return NodeState(
        counts={name: names.count(name) for name in names},
        since_epoch_ns=max((state.since.epoch_ns for state in known), default=0),
        held_for=tuple(sorted({cause for state in known for cause in state.causes})),
    )


def statuses(workers: Sequence[Worker]) -> list[RankStatus | None]:
    """What each of them has told; None for one that has told nothing."""
    return [_state_of(worker) for worker in workers]


def _state_of(worker: Worker) -> RankStatus | None:
    if worker.entry is None:
        return None
    state = read_status(status_of(Path(worker.entry.events)))
    # the file is that of the rank, and an earlier attempt may have been the last to write
    return state if state is not None and state.pid == worker.entry.pid else None
