"""Lives of the ranks of rank_crew.py, as ranks.py sees them from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import EventTail

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir

CREW = Path(__file__).with_name("rank_crew.py")
LIMIT_S = 120.0


class Crew:
    """The process that forks the ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lives = 0
        self._log = folder / "crew.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(CREW)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self._expect("ready")

    def begin(self, what: str, world: int, **more: Any) -> Life:
        """Fork the ranks of a life, in a folder of its own."""
        self._lives += 1
        folder = self._folder / f"life-{self._lives}"
        folder.mkdir()
        order = {"what": what, "world": world, "folder": str(folder), **more}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        pids = [int(self._expect(f"rank {rank} pid ")) for rank in range(world)]
        return Life(folder, pids)

    def wait_for_end(self, life: Life) -> set[int]:
        """The statuses with which its ranks have ended."""
        statuses = {int(self._expect("rank ").split()[-1]) for _ in life.pids}
        self._expect("all ended")
        return statuses

    def close(self) -> None:
        """End it; its ranks die with it."""
        self._process.kill()
        self._process.communicate()

    def _expect(self, word: str) -> str:
        """The rest of the next line, which must start with the word."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith(word):
            wrote = self._log.read_text()[-4000:]
            raise RuntimeError(f"the crew said {line!r}, wanted {word!r}; it wrote:\n{wrote}")
        return line.removeprefix(word).strip()


class Life:
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
    crew = Crew(folder)
    try:
        yield crew
    finally:
        crew.close()
