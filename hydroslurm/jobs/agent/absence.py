"""Which workers of a node the others wait for outside of a collective: they do not come to
``init_process_group``, or do not end. Pure but for what the kernel says of them.

A download, a data set that is prepared, a compilation, an export at the end take their time, and
use CPU or disk for it. So whatever is busy is never given up here, nor is a worker that may wait
for a busy one of its node, as for the lock of a download. Workers that are waited for, and that all
do nothing:

    others are in init_process_group    half of its time-out, at most ``stuck_s``
    others have trained to the end      ``stuck_s``: nothing there ever fails by a time-out
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from hydroslurm.core.status import RankStatus
from hydroslurm.elastic.roster import Awaited, Timing
from hydroslurm.jobs.agent.progress import (
    NEXT_LOOK_S,
    Use,
    is_idle,
    place_of,
    state_of,
    use_of,
)
from hydroslurm.jobs.agent.workers import Worker

LOOK_S = 0.9
"""The kernel counts CPU time in hundredths of a second: in less than this, one is not little."""


def meeting_s(statuses: Sequence[RankStatus | None]) -> float:
    """The time-out of the ``init_process_group`` in which one of them is; 0: none is."""
    return max((one.meeting_timeout_s or 0.0 for one in statuses if one is not None), default=0.0)


@dataclass
class Absence:
    """Looks at the workers of one generation, about once a second."""

    timing: Timing
    use_of: Callable[[int], Use] = use_of
    state_of: Callable[[int], str] = state_of
    _used: dict[int, Use] = field(default_factory=dict)
    _looked_s: float = 0.0
    _idle_since_s: float = 0.0

    def look(
        self,
        workers: Sequence[Worker],
        statuses: Sequence[RankStatus | None],
        *,
        ended: Collection[int],
        awaited: Awaited,
        now_s: float,
    ) -> str:
        """Who hangs, and why it is thought so; "" while nobody does.

        Args:
            statuses: of the workers, in their order.
            ended: local ranks that have exited with 0.
            awaited: what workers of other nodes wait for.
            now_s: monotonic.
        """
        took_s = now_s - self._looked_s
        if took_s < LOOK_S:
            return ""
        known = [
            pair for pair in zip(workers, statuses, strict=True) if pair[0].local_rank not in ended
        ]
        timeout_s = max(awaited.meeting_s, meeting_s(statuses))
        after_s, others = self.timing.stuck_s, "other ranks have ended"
        if not (ended or awaited.ended):
            known = [pair for pair in known if timeout_s and _is_outside(pair[1])]
            after_s = min(after_s, timeout_s / 2)
            others = (
                f"other ranks wait for it in init_process_group, which fails after {timeout_s:g} s"
            )
        used = {worker.pid: self.use_of(worker.pid) for worker, _ in known}
        waits = (
            used.keys() == self._used.keys()  # else one of them has come
            and took_s <= NEXT_LOOK_S
            and all(is_idle(self._used[pid], used[pid], took_s) for pid in used)
            and not any(_is_paused(status) for _, status in known)
        )
        self._used, self._looked_s = used, now_s
        if not waits:
            self._idle_since_s = now_s
        idle_s = now_s - self._idle_since_s
        if not known or idle_s < after_s:
            return ""
        return "; ".join(
            f"{self._who(worker, status, now_s)}, and has done nothing for {idle_s:.0f} s, while "
            f"{others}"
            for worker, status in known
        )

    def _who(self, worker: Worker, status: RankStatus | None, now_s: float) -> str:
        pid = worker.pid if worker.entry is None else worker.entry.pid
        place = "has not come to its `import torch`"
        if status is not None:
            place = place_of(status, self.state_of(pid), now_s=now_s) or "has not said where it is"
        return f"local rank {worker.local_rank} (pid {pid}) hangs: it {place}"


def _is_outside(status: RankStatus | None) -> bool:
    """Whether it has no process group, and does not wait for one."""
    return status is None or (status.collectives is None and status.meeting_timeout_s is None)


def _is_paused(status: RankStatus | None) -> bool:
    return status is not None and status.state in ("parking", "parked")
