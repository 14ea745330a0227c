"""What is to be said against a life that was disturbed, from what it has left on the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults.plans import Fault

from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import CheckpointError
from hydroslurm.training.attempts import AttemptLog

KEPT_BY_ALL = 50
"""A run that keeps so many checkpoints removes none of them in a round."""


@dataclass(frozen=True)
class Complaint:
    """``kind``: hang, lost commit, other bits, disagreement."""

    kind: str
    message: str


@dataclass(frozen=True)
class LifeSeen:
    """One life after its end.

    Attributes:
        codes: rank -> exit status.
        fired: the faults that came about.
        events: rank -> its events of this life.
        told: rank -> topic -> what it was told.
        whole: the steps of the checkpoints that are there and whole, in order.
        broken: what is wrong with the others.
        end_step: where the life has ended, as it is written down for all.
        newest: the last of ``whole``, 0 when there is none.
        begins: the step at which each rank that came so far has begun.
    """

    run: RunDir
    out: Path
    world: int
    keep: int
    codes: Mapping[int, int]
    fired: tuple[Fault, ...]
    hung: bool
    seconds: float
    said: str
    events: Mapping[int, tuple[Event, ...]]
    told: Mapping[int, Mapping[str, Any]]
    whole: tuple[int, ...]
    broken: tuple[str, ...]
    end_step: int | None

    @classmethod
    def look(
        cls, run: RunDir, *, life: str, pids: Mapping[int, int], world: int, **seen: Any
    ) -> LifeSeen:
        """Read what the ranks with these process ids have left."""
        whole, broken = _checkpoints(run)
        events = {rank: _events(run, rank, pid) for rank, pid in pids.items()}
        return cls(
            run=run,
            world=world,
            events=events,
            end_step=_end_step(run, events),
            told={rank: _told(run, rank, life) for rank in range(world)},
            whole=whole,
            broken=broken,
            **seen,
        )

    @property
    def newest(self) -> int:
        return self.whole[-1] if self.whole else 0

    @property
    def begins(self) -> dict[int, int]:
        return {
            rank: int(event.data["step"])
            for rank in range(self.world)
            for event in self.of(rank, EventKind.ATTEMPT_BEGAN)
        }

    def of(self, rank: int, *kinds: EventKind) -> list[Event]:
        return [event for event in self.events[rank] if event.kind in kinds]

    def did(self, *whats: str) -> bool:
        return any(fault.what in whats for fault in self.fired)


def check_life(life: LifeSeen, *, before: LifeSeen | None) -> list[Complaint]:
    """What must hold after every life."""
    found = []
    if life.hung:
        left = sorted(set(range(life.world)) - set(life.codes))
        last = {rank: _last_events(life, rank) for rank in range(life.world)}
        found.append(Complaint("hang", f"ranks still there: {left}; last events: {last}"))
    found += _check_commits(life)
    found += _check_begin(life, before)
    found += _check_same_message(life)
    found += _check_ends(life)
    return found


def check_last(life: LifeSeen, alone: Path) -> list[Complaint]:
    """What must hold when the run has finished: nobody sees that it was disturbed."""
    found = []
    if set(life.codes.values()) != {0}:
        found.append(Complaint("disagreement", f"the last life ended with {dict(life.codes)}"))
    if not life.out.exists() or life.out.read_text() != (alone / "out").read_text():
        found.append(Complaint("other bits", "the final state is not that of the run left alone"))
    for rank in range(life.world):
        wanted = {row[0]: row for row in _diary(alone / "run", rank)}
        rows = _diary(life.run.root, rank)
        wrong = [row[0] for row in rows if row != wanted.get(row[0])]
        missing = sorted(set(wanted) - {row[0] for row in rows})
        if wrong or missing:
            message = f"rank {rank}: other losses or samples at {wrong}, none at {missing}"
            found.append(Complaint("other bits", message))
    return found


def _check_commits(life: LifeSeen) -> list[Complaint]:
    """A commit that was reported is there, and what is there is whole."""
    found = [Complaint("lost commit", message) for message in life.broken]
    reported = sorted({step for rank in range(life.world) for step in _committed(life, rank)})
    must = reported if life.keep >= KEPT_BY_ALL else reported[-1:]
    gone = [step for step in must if step not in life.whole]
    if gone:
        found.append(Complaint("lost commit", f"reported as committed and not there: {gone}"))
    return found


def _check_begin(life: LifeSeen, before: LifeSeen | None) -> list[Complaint]:
    """All ranks begin at the newest checkpoint that the life before has left."""
    newest = before.newest if before else 0
    other = {rank: step for rank, step in life.begins.items() if step != newest}
    if not other:
        return []
    message = f"step {newest} was committed, and ranks began at {other}"
    behind = any(step < newest for step in other.values())
    return [Complaint("lost commit" if behind else "disagreement", message)]


def _check_same_message(life: LifeSeen) -> list[Complaint]:
    """What was agreed on is the same for all who were told, and so are the verdicts on saves."""
    found = []
    for topic in sorted({topic for told in life.told.values() for topic in told}):
        heard = {rank: told[topic] for rank, told in life.told.items() if topic in told}
        if len({json.dumps(outcome) for outcome in heard.values()}) > 1:
            found.append(Complaint("disagreement", f"{topic}: {heard}"))
    committed = {step for rank in range(life.world) for step in _committed(life, rank)}
    for rank in range(life.world):
        for event in life.of(rank, EventKind.SAVE_FAILED):
            step, reason = event.data["checkpoint_step"], str(event.data["reason"])
            if step in committed and "not known" not in reason and not life.did("kill_hub"):
                message = f"step {step} was committed, and failed for rank {rank}: {reason}"
                found.append(Complaint("disagreement", message))
    return found


def _check_ends(life: LifeSeen) -> list[Complaint]:
    """Without a death all leave in one way, and a stop loses no step."""
    signals_before_us = any(code < 0 for code in life.codes.values())
    if life.hung or signals_before_us or life.did("kill", "kill_hub", "error"):
        return []
    codes = set(life.codes.values())
    if codes not in ({0}, {RUN_AGAIN}):
        return [Complaint("disagreement", f"nobody died, and they ended with {dict(life.codes)}")]
    places = {
        event.step for rank in range(life.world) for event in life.of(rank, EventKind.SAFE_POINT)
    }
    if len(places) > 1:
        return [Complaint("disagreement", f"they stopped at the steps {sorted(map(str, places))}")]
    if codes == {RUN_AGAIN} and life.end_step not in (None, life.newest):
        message = f"stopped at step {life.end_step}, and the newest is {life.newest}"
        return [Complaint("lost commit", message)]
    return []


def _committed(life: LifeSeen, rank: int) -> list[int]:
    return [
        event.data["checkpoint_step"]
        for event in life.of(rank, EventKind.SAVE_COMMITTED)
        if event.data["tier"] == "durable"
    ]


def _checkpoints(run: RunDir) -> tuple[tuple[int, ...], tuple[str, ...]]:
    whole: list[int] = []
    broken: list[str] = []
    store = CheckpointStore(run.checkpoints)
    for checkpoint in store.committed():
        try:
            store.verify(checkpoint)
        except CheckpointError as error:
            broken.append(f"{checkpoint.path.name} is there and not whole: {error}")
        else:
            whole.append(checkpoint.step)
    broken += [f"{path.name}: {error}" for path, error in store.problems().items()]
    return tuple(whole), tuple(broken)


def _events(run: RunDir, rank: int, pid: int) -> tuple[Event, ...]:
    path = run.rank_events(rank)
    events = read_events(path) if path.exists() else ()
    return tuple(event for event in events if event.pid == pid)


def _end_step(run: RunDir, events: Mapping[int, Sequence[Event]]) -> int | None:
    numbers = {
        event.data["attempt"]
        for one in events.values()
        for event in one
        if event.kind is EventKind.ATTEMPT_BEGAN
    }
    lives = [life for life in AttemptLog(run.attempts_jsonl).attempts() if life.number in numbers]
    return lives[-1].end_step if lives else None


def _last_events(life: LifeSeen, rank: int) -> list[str]:
    return [event.kind.value for event in life.events[rank][-5:]]


def _told(run: RunDir, rank: int, life: str) -> dict[str, Any]:
    path = run.root / f"told-{rank}"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {topic: outcome for one, topic, outcome in rows if one == life}


def _diary(root: Path, rank: int) -> list[list[Any]]:
    path = root / f"diary-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
