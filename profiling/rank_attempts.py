"""Attempts of the forked ranks of rank_crew.py, as ranks.py sees them from outside."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import PROFILING, TESTS, EventTail  # makes the tests importable

# isort: split
import forkedranks
from processes import Child, child

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir

LIMIT_S = 120.0


class Crew:
    """The process that forks the ranks."""

    def __init__(self, program: Child, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._attempts = 0
        program.expect("ready")

    def begin(self, what: str, world: int, **more: Any) -> Attempt:
        """Fork the ranks of an attempt, in a folder of its own."""
        self._attempts += 1
        folder = self._folder / f"attempt-{self._attempts}"
        folder.mkdir()
        pids = forkedranks.start(
            self._program,
            world,
            what=what,
            folder=str(folder),
            meet=str(folder / "meet"),
            environ={"HYDROSLURM_STEP_KEY": secrets.token_hex(32)},
            **more,
        )
        return Attempt(folder, list(pids.values()))

    def wait_for_end(self, attempt: Attempt) -> set[int]:
        """The statuses with which its ranks have ended."""
        return set(forkedranks.wait_for_end(self._program, len(attempt.pids)).values())


class Attempt:
    """Ranks that train."""

    def __init__(self, folder: Path, pids: list[int]) -> None:
        self.folder = folder
        self.pids = pids
        self._run = RunDir(folder / "run")
        self._tails = [EventTail(self._run.rank_events(rank)) for rank in range(len(pids))]

    def wait_until_all_train(self) -> None:
        self.wait_for_all(EventKind.FIRST_STEP)

    def wait_for_all(self, kind: EventKind) -> list[Event]:
        """The next event of this kind of each rank."""
        return [tail.until(kind, limit_s=LIMIT_S) for tail in self._tails]

    def wait_for(self, rank: int, kind: EventKind) -> Event:
        return self._tails[rank].until(kind, limit_s=LIMIT_S)

    def signal(self, rank: int, signo: int) -> None:
        """Send it, and stay out of the way: on few cores the reader of events may sit on the very
        one that a rank needs."""
        os.kill(self.pids[rank], signo)
        time.sleep(0.1)

    def events(self, kind: EventKind) -> list[list[Event]]:
        """Of each rank, all of this kind."""
        return [
            [event for event in read_events(self._run.rank_events(rank)) if event.kind is kind]
            for rank in range(len(self.pids))
        ]


@contextmanager
def crew_in(folder: Path) -> Iterator[Crew]:
    """A crew that is gone after the block, and its ranks with it."""
    environ = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(PROFILING), str(TESTS)]),
    }
    program = (PROFILING / "rank_crew.py").read_text()
    with child(program, folder, environ=environ) as started:
        yield Crew(started, folder)
