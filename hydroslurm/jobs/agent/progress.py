"""How far the workers of one node are, as they tell: their step and pace, and which one hangs, in a
collective or outside of one. Pure but for what the kernel says of them.

A worker hangs if the others wait for it in a collective that it does not come to. Each worker says
with its heartbeat how many collectives it has issued; the coordinator says how many the furthest
rank of the generation has. One that is behind and stands still is waited for, and what it does
meanwhile says for how long:

    it is stopped (SIGSTOP)            ``silent_s``, as a whole member that says nothing
    it uses no CPU, reads and writes   half of the time-out of its process group: a deadlock, a
    nothing                            sleep, a file system that does not answer
    anything else                      nine tenths of that time-out: it may compile, evaluate or
                                       save, and whatever takes longer fails by the time-out itself

So no rank is given up that could have come in time. Ranks that have all issued the same collective,
or that are all busy without one, are left alone; so is a rank that is paused on purpose.

Others may also wait for workers that do not come to ``init_process_group``, or do not end. A
download, a data set that is prepared, a compilation, an export at the end take their time, and use
CPU or disk for it. So whatever is busy is never given up there, nor is a worker that may wait for a
busy one of its node, as for the lock of a download. Workers that are waited for, and that all do
nothing:

    others are in init_process_group   half of its time-out, at most ``stuck_s``
    others have trained to the end     ``stuck_s``: nothing there ever fails by a time-out
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydroslurm.core.proc import STATE, stat_of
from hydroslurm.core.status import RankStatus
from hydroslurm.elastic.roster import Awaited, Timing
from hydroslurm.jobs.agent.workers import Worker, family

DEFAULT_TIMEOUT_S = 600.0
"""Of a process group that does not say: NCCL's, the shorter one of torch's."""
IDLE_CPU = 0.05
"""Of one CPU. Our own threads, which look and tell, use less."""
IDLE_BYTES_PER_S = 16 << 10
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOOK_S = 0.9
"""The kernel counts CPU time in hundredths of a second: in less than this, one is not little."""
NEXT_LOOK_S = 2.5
"""A later one follows on nothing: the agent itself was stopped meanwhile."""

Use = tuple[float, int]
"""CPU seconds, and bytes that were read and written, of a process and all below it so far."""


@dataclass(frozen=True)
class Progress:
    """Of the workers of a node.

    Attributes:
        step: that of the furthest one; None while none has told.
        step_s, samples_per_s: of all ranks of the run; 0 while they are not known.
        collectives: issued by the one that has issued the fewest; None while not all tell.
        meeting_s: the time-out of the ``init_process_group`` in which one of them is; 0: none is.
        paused: one of them is held on purpose.
        hangs: which worker hangs, and why it is thought so; "" while none does.
        error: by which the script of one of them has ended; "" while none has.
        met: it had met the others before that.
        lost_peer: it ended because a connection to another rank had.
    """

    step: int | None = None
    step_s: float = 0.0
    samples_per_s: float = 0.0
    collectives: int | None = None
    meeting_s: float = 0.0
    paused: bool = False
    hangs: str = ""
    error: str = ""
    met: bool = True
    lost_peer: bool = False


@dataclass
class _Waited:
    """One worker: since when it stands where it is, does nothing, and is stopped."""

    since_s: float
    idle_since_s: float
    looked_s: float
    at: tuple[int, int] | None = None
    used: Use = (0.0, 0)
    stopped_since_s: float | None = None


def use_of(pid: int) -> Use:
    """What a process and all below it have used."""
    ticks = moved = 0
    for each in family(pid):
        with contextlib.suppress(OSError, ValueError, IndexError):
            stat = stat_of(each)
            ticks += int(stat[11]) + int(stat[12])  # utime, stime
            lines = Path(f"/proc/{each}/io").read_text().splitlines()
            moved += sum(int(line.split()[1]) for line in lines[:2])  # rchar, wchar
    return ticks / _TICKS_PER_S, moved


def is_idle(before: Use, now: Use, took_s: float) -> bool:
    """Whether somebody who used so much in that time does nothing."""
    busy_s, moved = now[0] - before[0], now[1] - before[1]
    # a child that has ended takes its numbers with it: whoever ends is at work
    return 0 <= busy_s <= IDLE_CPU * took_s and 0 <= moved <= IDLE_BYTES_PER_S * took_s


def place_of(status: RankStatus, state: str, *, now_s: float) -> str:
    """``stands at train.py:41 in evaluate``; "" where it has not said so. ``state``: as
    :func:`state_of`."""
    silent_s = now_s - status.as_of.mono_ns / 1e9
    if state == "D":
        return "waits in the kernel, mostly for a disk or a file system (state D)"
    if status.state == "ended":
        return "has ended its script, and does not exit"
    if status.heartbeat_s and silent_s > 3 * status.heartbeat_s + 5:
        return f"has said nothing for {silent_s:.0f} s, so that none of its threads runs Python"
    return f"stands at {status.stands_at}" if status.stands_at else ""


def state_of(pid: int) -> str:
    """The letter of /proc/PID/stat: ``T`` is stopped by a signal (``t``: by a debugger), ``D``
    waits in the kernel; "" for no process."""
    try:
        return stat_of(pid)[STATE]
    except (OSError, IndexError):
        return ""


@dataclass
class Watch:
    """Who hangs, in a collective or outside of one; looks at the workers of one generation, about
    once a second."""

    timing: Timing
    use_of: Callable[[int], Use] = use_of
    state_of: Callable[[int], str] = state_of
    _seen: dict[int, _Waited] = field(default_factory=dict)
    _looked_s: float = 0.0
    _used_outside: dict[int, Use] = field(default_factory=dict)
    _looked_outside_s: float = 0.0
    _idle_outside_since_s: float = 0.0

    def look(
        self,
        workers: Sequence[Worker],
        statuses: Sequence[RankStatus | None],
        *,
        ended: Collection[int] = (),
        awaited: Awaited,
        now_s: float,
    ) -> Progress:
        """
        Args:
            statuses: of the workers, in their order.
            ended: local ranks that have exited with 0.
            awaited: what workers of other nodes wait for.
            now_s: monotonic.
        """
        if now_s - self._looked_s > NEXT_LOOK_S:
            self._seen.clear()
        self._looked_s = now_s
        told = [one for one in statuses if one is not None]
        issued = [one.collectives for one in told if one.collectives is not None]
        furthest = max([awaited.collectives, *issued])
        meeting_s = max((one.meeting_timeout_s or 0.0 for one in told), default=0.0)
        hang = [
            reason
            for worker, status in zip(workers, statuses, strict=True)
            if (reason := self._why_hung(worker, status, furthest, now_s))
        ]
        steps_per_s = max((one.steps_per_s or 0.0 for one in told), default=0.0)
        samples = max((one.samples_per_step or 0 for one in told), default=0)
        failed = sorted((one for one in told if one.error), key=lambda one: one.lost_peer)
        return Progress(
            error=failed[0].error if failed else "",
            met=all(one.met for one in failed),
            lost_peer=bool(failed) and failed[0].lost_peer,
            step=max((one.step for one in told if one.step is not None), default=None),
            step_s=1 / steps_per_s if steps_per_s else 0.0,
            samples_per_s=steps_per_s * samples,
            collectives=min(issued) if issued and len(issued) == len(workers) else None,
            meeting_s=meeting_s,
            paused=any(map(_is_paused, told)),
            hangs="; ".join(hang)
            or self._why_hung_outside(
                workers,
                statuses,
                ended=ended,
                others_ended=awaited.ended,
                timeout_s=max(awaited.meeting_s, meeting_s),
                now_s=now_s,
            ),
        )

    def _why_hung(
        self, worker: Worker, status: RankStatus | None, furthest: int, now_s: float
    ) -> str:
        pid = worker.rank_pid
        waited = self._seen.setdefault(worker.pid, _Waited(now_s, now_s, now_s))
        who = f"local rank {worker.local_rank} (pid {pid})"
        state = self.state_of(pid)
        if state != "T":
            waited.stopped_since_s = None
        elif waited.stopped_since_s is None:
            waited.stopped_since_s = now_s
        elif (stopped_s := now_s - waited.stopped_since_s) >= self.timing.silent_s:
            return f"{who} has been stopped for {stopped_s:.0f} s (SIGSTOP)"
        issued = None if status is None else status.collectives
        at = None if issued is None else (issued, furthest)
        used = self.use_of(worker.pid) if issued is not None and issued < furthest else (0.0, 0)
        took_s, before = now_s - waited.looked_s, waited.used
        waited.used, waited.looked_s = used, now_s
        if at is None or at != waited.at or _is_paused(status) or at[0] >= at[1]:
            waited.at, waited.since_s, waited.idle_since_s = at, now_s, now_s
            return ""
        if not is_idle(before, used, took_s):
            waited.idle_since_s = now_s
        assert status is not None
        return self._why_overdue(status, waited, who, state, now_s)

    def _why_overdue(
        self, status: RankStatus, waited: _Waited, who: str, state: str, now_s: float
    ) -> str:
        timeout_s = status.collective_timeout_s or DEFAULT_TIMEOUT_S
        behind_s, idle_s = now_s - waited.since_s, now_s - waited.idle_since_s
        # what a rank says is as old as its heartbeat, and so is what the others say
        most_s = max(timeout_s / 2, 0.9 * timeout_s - 2 * (status.heartbeat_s or 0.0))
        if idle_s < min(self.timing.stuck_s, timeout_s / 2) and behind_s < most_s:
            return ""
        assert waited.at is not None
        place = place_of(status, state, now_s=now_s) or "does not come"
        doing = "and does nothing" if idle_s >= behind_s else "though it is busy"
        return (
            f"{who} hangs: it {place}, {doing}, and other ranks have waited for {behind_s:.0f} s "
            f"for it in collective {waited.at[0] + 1}, which fails after {timeout_s:g} s"
        )

    def _why_hung_outside(
        self,
        workers: Sequence[Worker],
        statuses: Sequence[RankStatus | None],
        *,
        ended: Collection[int],
        others_ended: bool,
        timeout_s: float,
        now_s: float,
    ) -> str:
        """Who hangs outside of a collective; "" while nobody does. ``timeout_s``: that of an
        ``init_process_group`` in which others wait, here or elsewhere."""
        took_s = now_s - self._looked_outside_s
        if took_s < LOOK_S:
            return ""
        known = [
            pair for pair in zip(workers, statuses, strict=True) if pair[0].local_rank not in ended
        ]
        after_s, others = self.timing.stuck_s, "other ranks have ended"
        if not (ended or others_ended):
            known = [pair for pair in known if timeout_s and _is_outside(pair[1])]
            after_s = min(after_s, timeout_s / 2)
            others = (
                f"other ranks wait for it in init_process_group, which fails after {timeout_s:g} s"
            )
        used = {worker.pid: self.use_of(worker.pid) for worker, _ in known}
        waits = (
            used.keys() == self._used_outside.keys()  # else one of them has come
            and took_s <= NEXT_LOOK_S
            and all(is_idle(self._used_outside[pid], used[pid], took_s) for pid in used)
            and not any(_is_paused(status) for _, status in known)
        )
        self._used_outside, self._looked_outside_s = used, now_s
        if not waits:
            self._idle_outside_since_s = now_s
        idle_s = now_s - self._idle_outside_since_s
        if not known or idle_s < after_s:
            return ""
        return "; ".join(
            f"{self._who(worker, status, now_s)}, and has done nothing for {idle_s:.0f} s, while "
            f"{others}"
            for worker, status in known
        )

    def _who(self, worker: Worker, status: RankStatus | None, now_s: float) -> str:
        pid = worker.rank_pid
        place = "has not come to its `import torch`"
        if status is not None:
            place = place_of(status, self.state_of(pid), now_s=now_s) or "has not said where it is"
        return f"local rank {worker.local_rank} (pid {pid}) hangs: it {place}"


def _is_outside(status: RankStatus | None) -> bool:
    """Whether it has no process group, and does not wait for one."""
    return status is None or (status.collectives is None and status.meeting_timeout_s is None)


def _is_paused(status: RankStatus | None) -> bool:
    """Whether it is held on purpose."""
    return status is not None and status.state in ("parking", "parked")
