"""How far each attempt of a job has come, as the job itself writes it: also one that was killed,
and one that was never asked to stop.

One file per attempt, named by Slurm's count of restarts, holds two numbers: the step with which the
attempt began, and the last one that it made.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_FORM = struct.Struct("<qq")


class Progress:
    """Written by the job, one ``pwrite`` per step."""

    def __init__(
        self, folder: Path, begin: int, *, environ: Mapping[str, str] = os.environ
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        attempt = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._fd = os.open(folder / f"attempt-{attempt:05d}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._begin = begin
        self.made(begin)

    def made(self, step: int) -> None:
        """Say that a step is complete."""
        os.pwrite(self._fd, _FORM.pack(self._begin, step), 0)


@dataclass(frozen=True)
class AttemptSpan:
    """The steps of one attempt: ``begin`` were done when it began, ``end`` when it ended."""

    begin: int
    end: int


def read_progress(folder: Path) -> list[AttemptSpan]:
    """All attempts so far, oldest first."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    texts = [path.read_bytes() for path in files]
    return [AttemptSpan(*_FORM.unpack(text)) for text in texts if len(text) == _FORM.size]


def steps_lost(attempts: Sequence[AttemptSpan]) -> list[int]:
    """Per restart, how many steps had been made that the next attempt did not begin with."""
    return [before.end - after.begin for before, after in itertools.pairwise(attempts)]
