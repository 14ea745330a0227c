"""Attempts of the run in ``crew.py``, and what is done to its ranks."""

from __future__ import annotations

import itertools
import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forkedranks import start, wait_for_end
from processes import Child, wait_until

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.training.attempts import AttemptLog, AttemptRecord

PROGRAM = Path(__file__).with_name("crew.py")
_numbers = itertools.count()


@dataclass
class Attempt:
    """One that has begun."""

    crew: Child
    world: int
    pids: dict[int, int]
    codes: dict[int, int] = field(default_factory=dict)
    said: str = ""
    begin: int = 0

    def signal(self, rank: int, signo: int = signal.SIGTERM) -> None:
        os.kill(self.pids[rank], signo)

    def end(self) -> Attempt:
        """Wait until all ranks have ended."""
        self.codes = wait_for_end(self.crew, self.world)
        self.said = "\n".join(self.crew.lines[self.begin :])
        return self


@dataclass
class Story:
    """The attempts of one run, in a folder of their own."""

    crew: Child
    folder: Path

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def wait_for_more(self, steps: int, *, rank: int = 0) -> None:
        """Until the rank has trained so many more."""
        before = len(self.steps(rank))
        wait_until(lambda: len(self.steps(rank)) >= before + steps, "the run to train on")

    def begin(self, world: int, **options: Any) -> Attempt:
        """Start an attempt of so many ranks."""
        begin = len(self.crew.lines)
        directory = str(self.run.root)
        pids = start(
            self.crew,
            world,
            directory=directory,
            out=str(self.out),
            meet=str(self.folder / f"meet-{next(_numbers)}"),
            environ={"HYDROSLURM_RUN_DIR": directory, **options.pop("environ", {})},
            **options,
        )
        return Attempt(self.crew, world, pids, begin=begin)

    def begin_training(self, world: int, **options: Any) -> Attempt:
        """One whose ranks have all made steps, and that lasts longer than any test."""
        attempt = self.begin(world, **{"epochs": 400, **options})
        wait_until(lambda: all(self.steps(rank) for rank in range(world)), "the first steps")
        self.wait_for(EventKind.RANKS_JOINED, world=world)
        return attempt

    def live(self, world: int, **options: Any) -> Attempt:
        """One attempt, left alone to its end."""
        return self.begin(world, **options).end()

    def go(self) -> None:
        """Let the rank go on that is held."""
        (self.run.root / "go").touch()

    def wait_for(self, kind: EventKind, *, world: int, times: int = 1) -> None:
        """Until every rank has written such an event, so often, in the attempt of now."""

        def seen() -> bool:
            return all(self._of_now(rank, kind) >= times for rank in range(world))

        wait_until(seen, f"{kind.value} of {world} ranks")

    def _of_now(self, rank: int, kind: EventKind) -> int:
        if not self.run.rank_events(rank).exists():
            return 0
        kinds = [event.kind for event in self.events(rank)]
        begins = [n for n, one in enumerate(kinds) if one is EventKind.INSTALLED]
        return kinds[begins[-1] :].count(kind) if begins else 0

    def attempts(self) -> tuple[AttemptRecord, ...]:
        return AttemptLog(self.run.attempts_jsonl).attempts()

    def events(self, rank: int, *kinds: EventKind) -> list[Event]:
        found = read_events(self.run.rank_events(rank))
        return [event for event in found if not kinds or event.kind in kinds]

    def committed(self, rank: int) -> set[int]:
        """The steps that the rank has seen committed, over all attempts."""
        events = self.events(rank, EventKind.SAVE_COMMITTED)
        return {event.data["checkpoint_step"] for event in events}

    def steps(self, rank: int) -> list[list[Any]]:
        """[step, loss, samples] in the order in which the rank trained them, over all attempts."""
        path = self.run.root / f"diary-{rank}"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
