"""How far each life of a job has come, told by the job itself: also by a life that was killed, and
whoever saves its state.

One file per life, named by Slurm's count of restarts, holds two numbers: the step with which the
life began, and the last one that it made.
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
        life = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._fd = os.open(folder / f"life-{life:05d}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._begin = begin
        self.made(begin)

    def made(self, step: int) -> None:
        """Say that a step is complete."""
        os.pwrite(self._fd, _FORM.pack(self._begin, step), 0)


@dataclass(frozen=True)
class LifeSpan:
    """The steps of one life: ``begin`` were done when it began, ``end`` when it ended."""

    begin: int
    end: int


def read_progress(folder: Path) -> list[LifeSpan]:
    """All lives so far, oldest first."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    texts = [path.read_bytes() for path in files]
    return [LifeSpan(*_FORM.unpack(text)) for text in texts if len(text) == _FORM.size]


def steps_lost(lives: Sequence[LifeSpan]) -> list[int]:
    """Per restart, how many steps had been made and were not in what the next life began with."""
    return [before.end - after.begin for before, after in itertools.pairwise(lives)]
