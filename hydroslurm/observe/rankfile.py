"""Follow one rank's event file: the end of it first, then only what is appended."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import Tail
from hydroslurm.core.rankstate import RankState, after

TAIL_BYTES = 64 * 1024
"""So much of the end of a file is read at first; what happened before matters to a report."""
MOST_BYTES = 1024 * 1024
"""When more than this was appended at once, only its tail is read."""


@dataclass
class RankFacts:
    """What the events that were read say of one rank.

    Attributes:
        state: after the last of them; None before the first.
        whole: the file was read from its beginning on, so that what is not known did not happen.
        attempt: of its newest Run: restart count, step at which it began, when (epoch ns).
        commit: newest durable checkpoint: step, when it was committed (epoch ns).
        save_s: the longest durable save among the events that were read.
        marks: the last two events with different steps, oldest first: step, when, restart count.
        finished: its training is done.
    """

    state: RankState | None = None
    whole: bool = False
    attempt: tuple[int, int, int] | None = None
    commit: tuple[int, int] | None = None
    save_s: float | None = None
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    finished: bool = False

    def take(self, event: Event) -> None:
        """Count one more event in."""
        self.state = after(self.state, event)
        step, data = event.step, event.data
        if step is not None and (not self.marks or self.marks[-1][0] != step):
            self.marks = [*self.marks[-1:], (step, event.epoch_ns, event.restart_count)]
        if event.kind is EventKind.ATTEMPT_BEGAN:
            self.attempt = (event.restart_count, _step(data), event.epoch_ns)
        elif event.kind is EventKind.RUN_FINISHED:
            self.finished = True
        elif event.kind is EventKind.SAVE_COMMITTED and data.get("tier") == "durable":
            committed = data.get("checkpoint_step")
            if committed is not None:
                self.commit = (committed, event.epoch_ns)
            seconds = data.get("seconds")
            if seconds is not None:
                self.save_s = max(self.save_s or 0.0, float(seconds))


class RankFile:
    """Follow one file; costs one ``stat`` as long as nothing is appended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts = RankFacts()
        self._inode = 0
        self._tail = Tail(path)

    def read(self, *, budget_bytes: int) -> int:
        """Read what was appended, of which at most so much; returns how much that was. What cannot
        be read, or is no such file, changes nothing."""
        before = 0
        try:
            now = self.path.lstat()
            if not stat.S_ISREG(now.st_mode):
                return 0
            self._begin(now)
            before = self._tail.bytes_read
            if now.st_size > self._tail.offset:
                for line in self._tail.lines(most_bytes=budget_bytes):
                    self._take(line)
        except OSError:
            return 0
        return self._tail.bytes_read - before

    def _begin(self, now: os.stat_result) -> None:
        """Where to read on: for a file that is new to us, was replaced, or has grown by much, near
        its end."""
        new = now.st_ino != self._inode or now.st_size < self._tail.offset
        if new:
            self.facts = RankFacts(whole=now.st_size <= TAIL_BYTES)
            self._inode = now.st_ino
        elif now.st_size - self._tail.offset > MOST_BYTES:
            self.facts.whole = False
        else:
            return
        self._tail = Tail(self.path, last_bytes=TAIL_BYTES)

    def _take(self, line: bytes) -> None:
        try:
            event = Event.from_json(line)
        except ValueError:
            return  # torn, foreign, or of a later version
        self.facts.take(event.dated_now())


def _step(data: Mapping[str, Any]) -> int:
    value = data.get("step")
    return value if type(value) is int else 0
