"""The other trainings of this job, which a requeue would end as well.

Slurm signals all job steps of a job, and ``scontrol requeue`` kills them all at once: the training
that is saved first must not take the others' time to save away.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status

_LOOK_S = 0.05
_SILENT_S = 15.0
"""A rank that has not written its status for so long, or for three heartbeats, has been killed."""


def wait_until_saved(folders: Iterable[RunDir], *, restart_count: int, until_mono_s: float) -> None:
    """Wait until none of these trainings is on its way to a save, or the time is over."""
    watched = [_Neighbour(folder, restart_count) for folder in folders]
    while time.monotonic() < until_mono_s:
        watched = [one for one in watched if one.is_at_work()]
        if not watched:
            return
        time.sleep(_LOOK_S)


class _Neighbour:
    def __init__(self, run: RunDir, restart_count: int) -> None:
        self._run = run
        self._restart_count = restart_count
        self._changed: dict[int, tuple[tuple[int, int], float]] = {}

    def is_at_work(self) -> bool:
        """Whether a rank of it lives, and none has asked for the requeue, which follows the
        commit of all."""
        try:
            files = self._run.rank_status_files()
        except OSError:
            return False
        alive = [rank for rank, path in files.items() if self._lives(rank, read_status(path))]
        return bool(alive) and not any(self._is_saved(rank) for rank in files)

    def _lives(self, rank: int, status: RankStatus | None) -> bool:
        if status is None or status.restart_count != self._restart_count:
            return False
        if status.state == "ended" or status.finished or not status.saver:
            return False
        now_s = time.monotonic()
        try:
            facts = self._run.rank_status(rank).stat()
        except OSError:
            return False
        version = facts.st_ino, facts.st_mtime_ns
        if self._changed.get(rank, (None, 0.0))[0] != version:
            self._changed[rank] = version, now_s
        return now_s - self._changed[rank][1] < max(_SILENT_S, 3 * (status.heartbeat_s or 0.0))

    def _is_saved(self, rank: int) -> bool:
        asked = read_events(self._run.rank_events(rank), kinds=(EventKind.REQUEUE_ASKED,))
        return any(event.restart_count == self._restart_count for event in asked)
