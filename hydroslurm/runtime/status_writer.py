"""Write the status of this rank: what its events say, and as a heartbeat its step.

Steps are not logged as events, so between two saves only the heartbeat shows progress. The
training loop pays nothing: it sets an attribute, and the controller's thread reads it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydroslurm.core.events import Event, clocks
from hydroslurm.core.files import open_regular, write_atomically
from hydroslurm.core.status import (
    LIMIT_BYTES,
    Moment,
    RankStatus,
    fold,
    load_status,
)

HEARTBEAT_ENV = "HYDROSLURM_HEARTBEAT_S"
"""Seconds between two heartbeats; 0 for none."""

DEFAULT_EVERY_S = 10.0
LEAST_EVERY_S = 0.1
_SETTLE_S = 0.0005
"""A change is written so much later: events that come together are written once."""
_RETRY_S = 1.0


def interval_s(environ: Mapping[str, str]) -> float:
    """Read HYDROSLURM_HEARTBEAT_S (0: never); the default where it is no number, which must not end
    a training."""
    try:
        asked_s = float(environ.get(HEARTBEAT_ENV) or DEFAULT_EVERY_S)
    except ValueError:
        return DEFAULT_EVERY_S
    if asked_s != asked_s:
        return DEFAULT_EVERY_S
    return max(asked_s, LEAST_EVERY_S) if asked_s > 0 else 0.0


class StatusWriter:
    """Keeps the status file of one rank up to date.

    Any thread may :meth:`note` an event, which takes no lock; the rest is for one thread. What
    cannot be written is tried again, silently: the event log beside it warns of a disk that cannot
    be written.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        every_s: float,
        look: Callable[[int | None], Mapping[str, Any]] = lambda _: {},
    ) -> None:
        """
        Args:
            path: None writes nothing.
            every_s: 0 writes only what changes.
            look: asked at each heartbeat, with the step, for more fields of the status.
        """
        self._path = path
        self._look = look
        self._every_s = every_s
        self._events: deque[Event] = deque()
        self._changed_mono_s: float | None = None
        self._beat_mono_s = time.monotonic() + (every_s or float("inf"))
        self._seen: tuple[int, float] | None = None
        """Where the rate is measured from: a step, and when."""
        self._status: RankStatus | None = None
        if path is not None:
            try:
                self._status = load_status(path)  # of the attempt before
            except (OSError, ValueError):
                pass

    def note(self, event: Event) -> None:
        """Count one more event in; it is written soon."""
        if self._path is None:
            return
        self._events.append(event)
        if self._changed_mono_s is None:
            self._changed_mono_s = time.monotonic()

    def wait_s(self) -> float | None:
        """How long until :meth:`write` has something to do; None for never."""
        if self._path is None:
            return None
        return max(0.0, self._due_mono_s() - time.monotonic())

    def write(self, step: int | None, *, at_once: bool = False) -> None:
        """Replace the file, if something has changed or the heartbeat is due.

        Args:
            step: the training step now; without one there is no heartbeat, unless there is more to
                say.
            at_once: do not wait for what comes together with a change.
        """
        now_mono_s = time.monotonic()
        if self._path is None or not (at_once or now_mono_s >= self._due_mono_s()):
            return
        is_beat = now_mono_s >= self._beat_mono_s
        if is_beat:
            self._beat_mono_s = now_mono_s + self._every_s
        has_changed, self._changed_mono_s = self._changed_mono_s is not None, None
        # cleared before they are taken: an event that comes meanwhile sets it again
        while self._events:
            self._status = fold((self._events.popleft(),), self._status)
        more = self._look(step) if is_beat else {}
        is_beat = is_beat and not (step is None and not more)
        if self._status is None or not (has_changed or is_beat):
            return
        self._status = replace(self._status, **more)
        self._status = self._with_step(self._status, step, now_mono_s, is_beat=is_beat)
        try:
            _put(self._path, self._status.to_json().encode())
        except OSError:
            self._changed_mono_s = now_mono_s + _RETRY_S

    def close(self, step: int | None) -> None:
        """Write what has not been written yet, and nothing any more."""
        self.write(step, at_once=True)
        self._path = None

    def _due_mono_s(self) -> float:
        changed_mono_s = self._changed_mono_s
        if changed_mono_s is None:
            return self._beat_mono_s
        return min(changed_mono_s + _SETTLE_S, self._beat_mono_s)

    def _with_step(
        self, status: RankStatus, step: int | None, now_mono_s: float, *, is_beat: bool
    ) -> RankStatus:
        now = Moment(*clocks())
        status = replace(status, as_of=now, heartbeat_s=self._every_s or None)
        if step is None:
            return status
        if status.step != step or status.step_since is None:
            status = replace(status, step=step, step_since=now)
        if self._seen is None:
            self._seen = step, now_mono_s
        elif is_beat and step != self._seen[0]:
            rate = max(0.0, (step - self._seen[0]) / (now_mono_s - self._seen[1]))
            self._seen = step, now_mono_s
            status = replace(status, steps_per_s=rate)
        return status


def _put(path: Path, data: bytes) -> None:
    if len(data) > LIMIT_BYTES:
        return
    try:
        write_atomically(path, data)
    except OSError:
        # a full disk has no room for another file, but for other bytes in this one
        fd = open_regular(path, os.O_WRONLY)
        try:
            os.pwrite(fd, data.ljust(os.fstat(fd).st_size), 0)
        finally:
            os.close(fd)
