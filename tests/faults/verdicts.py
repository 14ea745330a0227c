"""What is to be said against an attempt that was disturbed, from what it has left on the disk."""

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
class AttemptSeen:
    """One attempt after its end.

    Attributes:
        codes: rank -> exit status.
        fired: the faults that came about.
        events: rank -> its events of this attempt.
        told: rank -> topic -> what it was told.
        whole: the steps of the checkpoints that are there and whole, in order.
        broken: what is wrong with the others.
        end_step: where the attempt has ended, as it is written down for all.
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
    said: str
    events: Mapping[int, tuple[Event, ...]]
    told: Mapping[int, Mapping[str, Any]]
    whole: tuple[int, ...]
    broken: tuple[str, ...]
    end_step: int | None

    @classmethod
    def look(
        cls, run: RunDir, *, attempt: str, pids: Mapping[int, int], world: int, **seen: Any
    ) -> AttemptSeen:
        """Read what the ranks with these process ids have left."""
        whole, broken = _checkpoints(run)
        events = {rank: _events(run, rank, pid) for rank, pid in pids.items()}
        return cls(
            run=run,
            world=world,
            events=events,
            end_step=_end_step(run, events),
            told={rank: _told(run, rank, attempt) for rank in range(world)},
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


def check_attempt(attempt: AttemptSeen, *, before: AttemptSeen | None) -> list[Complaint]:
    """What must hold after every attempt."""
    found = []
    if attempt.hung:
        left = sorted(set(range(attempt.world)) - set(attempt.codes))
        last = {rank: _last_events(attempt, rank) for rank in range(attempt.world)}
        found.append(Complaint("hang", f"ranks still there: {left}; last events: {last}"))
    found += _check_commits(attempt)
    found += _check_begin(attempt, before)
    found += _check_same_message(attempt)
    found += _check_ends(attempt)
    return found


def check_last(attempt: AttemptSeen, alone: Path) -> list[Complaint]:
    """What must hold when the run has finished: nobody sees that it was disturbed."""
    found = []
    if set(attempt.codes.values()) != {0}:
        found.append(
            Complaint("disagreement", f"the last attempt ended with {dict(attempt.codes)}")
        )
    if not attempt.out.exists() or attempt.out.read_text() != (alone / "out").read_text():
        found.append(Complaint("other bits", "the final state is not that of the run left alone"))
    for rank in range(attempt.world):
        wanted = {row[0]: row for row in _diary(alone / "run", rank)}
        rows = _diary(attempt.run.root, rank)
        wrong = [row[0] for row in rows if row != wanted.get(row[0])]
        missing = sorted(set(wanted) - {row[0] for row in rows})
        if wrong or missing:
            message = f"rank {rank}: other losses or samples at {wrong}, none at {missing}"
            found.append(Complaint("other bits", message))
    return found


def _check_commits(attempt: AttemptSeen) -> list[Complaint]:
    """A commit that was reported is there, and what is there is whole."""
    found = [Complaint("lost commit", message) for message in attempt.broken]
    reported = sorted({step for rank in range(attempt.world) for step in _committed(attempt, rank)})
    must = reported if attempt.keep >= KEPT_BY_ALL else reported[-1:]
    gone = [step for step in must if step not in attempt.whole]
    if gone:
        found.append(Complaint("lost commit", f"reported as committed and not there: {gone}"))
    return found


def _check_begin(attempt: AttemptSeen, before: AttemptSeen | None) -> list[Complaint]:
    """All ranks begin at the newest checkpoint that the attempt before has left."""
    newest = before.newest if before else 0
    other = {rank: step for rank, step in attempt.begins.items() if step != newest}
    if not other:
        return []
    message = f"step {newest} was committed, and ranks began at {other}"
    behind = any(step < newest for step in other.values())
    return [Complaint("lost commit" if behind else "disagreement", message)]


def _check_same_message(attempt: AttemptSeen) -> list[Complaint]:
    """What was agreed on is the same for all who were told, and so are the verdicts on saves."""
    found = []
    for topic in sorted({topic for told in attempt.told.values() for topic in told}):
        heard = {rank: told[topic] for rank, told in attempt.told.items() if topic in told}
        if len({json.dumps(outcome) for outcome in heard.values()}) > 1:
            found.append(Complaint("disagreement", f"{topic}: {heard}"))
    committed = {step for rank in range(attempt.world) for step in _committed(attempt, rank)}
    for rank in range(attempt.world):
        for event in attempt.of(rank, EventKind.SAVE_FAILED):
            step, reason = event.data["checkpoint_step"], str(event.data["reason"])
            is_known = "not known" not in reason and not attempt.did("kill_coordinator")
            if step in committed and is_known:
                message = f"step {step} was committed, and failed for rank {rank}: {reason}"
                found.append(Complaint("disagreement", message))
    return found


def _check_ends(attempt: AttemptSeen) -> list[Complaint]:
    """Without a death all leave in one way, and a stop loses no step."""
    signals_before_us = any(code < 0 for code in attempt.codes.values())
    if attempt.hung or signals_before_us or attempt.did("kill", "kill_coordinator", "error"):
        return []
    codes = set(attempt.codes.values())
    if codes not in ({0}, {RUN_AGAIN}):
        return [
            Complaint("disagreement", f"nobody died, and they ended with {dict(attempt.codes)}")
        ]
    places = {
        event.step
        for rank in range(attempt.world)
        for event in attempt.of(rank, EventKind.SAFE_POINT)
    }
    if len(places) > 1:
        return [Complaint("disagreement", f"they stopped at the steps {sorted(map(str, places))}")]
    if codes == {RUN_AGAIN} and attempt.end_step not in (None, attempt.newest):
        message = f"stopped at step {attempt.end_step}, and the newest is {attempt.newest}"
        return [Complaint("lost commit", message)]
    return []


def _committed(attempt: AttemptSeen, rank: int) -> list[int]:
    return [event.data["checkpoint_step"] for event in attempt.of(rank, EventKind.SAVE_COMMITTED)]


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
    attempts = [
        attempt
        for attempt in AttemptLog(run.attempts_jsonl).attempts()
        if attempt.number in numbers
    ]
    return attempts[-1].end_step if attempts else None


def _last_events(attempt: AttemptSeen, rank: int) -> list[str]:
    return [event.kind.value for event in attempt.events[rank][-5:]]


def _told(run: RunDir, rank: int, attempt: str) -> dict[str, Any]:
    path = run.root / f"told-{rank}"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {topic: outcome for one, topic, outcome in rows if one == attempt}


def _diary(root: Path, rank: int) -> list[list[Any]]:
    path = root / f"diary-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
