"""Attempts of the job in ``attempts_of_a_job.py``, one after the other, with the diary they
write."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Child

PROGRAM = Path(__file__).with_name("attempts_of_a_job.py")


@dataclass
class Attempt:
    """One that is over: its exit status, what it said, and the diary entries that it wrote."""

    code: int
    said: str
    diary: list[str]


@dataclass
class Story:
    """The attempts of one run, in a folder of their own."""

    child: Child
    folder: Path
    saves: bool = True
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.folder / "run"

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def live(self, **options: Any) -> Attempt:
        """One attempt to its end. With ``hold`` it gets a SIGTERM there, or ``signo``."""
        signo = options.pop("signo", signal.SIGTERM)
        where = {"directory": str(self.directory)} if self.saves else {}
        given = {**where, "diary": str(self.folder / "diary"), "out": str(self.out), **options}
        begin, wrote = len(self.child.lines), len(self._diary())
        self.child.say(json.dumps(given))
        pid = int(self.child.expect("pid"))
        if "hold" in options:
            self.child.expect("at")
            os.kill(pid, signo)
        code = int(self.child.expect("ended"))
        said = "\n".join(self.child.lines[begin:])
        attempt = Attempt(code, said, self._diary()[wrote:])
        self.attempts.append(attempt)
        return attempt

    def _diary(self) -> list[str]:
        path = self.folder / "diary"
        return path.read_text().splitlines() if path.exists() else []


WHOLE = [
    "download",
    "build",
    "weights",
    "first look",
    *(
        entry
        for epoch in range(3)
        for entry in (
            *(f"train {epoch}.{step}" for step in range(4)),
            f"trained {epoch}",
            f"validate {epoch}",
            f"asked {epoch + 1}",
        )
    ),
    "exit",
]
"""The diary of a run that is left alone."""


def since(entry: str) -> list[str]:
    """What a run still writes from an entry on."""
    return WHOLE[WHOLE.index(entry) :]


def until(entry: str) -> list[str]:
    """What it has written when it is at an entry."""
    return WHOLE[: WHOLE.index(entry) + 1]
