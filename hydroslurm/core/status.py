"""The status of a rank: one small file beside its event log, with where the rank is now.

Each rank folds its own events into it (:func:`after`) and replaces the file whenever something
changed and with every heartbeat. Everything that shows a job's state reads this file; the
history is in the event log, which only the report reads whole.

    rank-00000.jsonl     the log
    rank-00000.json      the status

The file is a hint, not a promise: it is not synced to disk, and a rank that is killed leaves the
status it had some milliseconds before.
"""

from __future__ import annotations

import bisect
import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from hydroslurm.core.decoding import (
    Count,
    Duration,
    Integer,
    Rank,
    Seconds,
    Small,
    Text,
    decode,
    encode,
)
from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.files import read_regular
from hydroslurm.core.goodput import Account, AttemptTime, Goodput

LIMIT_BYTES = 64 << 10
"""A longer file is not read, and not written."""
PAUSE_BOUNDS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.005, 0.01, 0.1, 1.0, 10.0)
"""Upper bounds of the buckets of the pause histogram; one more is for all that took longer."""
_MOST_PREEMPTIONS = 1000
_MOST_TEXT = 2000


class Moment(NamedTuple):
    """When something happened: CLOCK_MONOTONIC (0: that of another boot) and CLOCK_REALTIME."""

    mono_ns: Count
    epoch_ns: Count

    @classmethod
    def of(cls, event: Event) -> Moment:
        return cls(event.mono_ns, event.epoch_ns)


NEVER = Moment(0, 0)
State = Literal["running", "parking", "parked", "stopping", "ended", "killed"]
Saver = Literal["", "attempt_began", "stops_taken"]
PauseCounts = Annotated[
    tuple[Count, ...],
    msgspec.Meta(min_length=len(PAUSE_BOUNDS_S) + 1, max_length=len(PAUSE_BOUNDS_S) + 1),
]


@dataclass(frozen=True)
class RankStatus:
    """Where one rank is.

    Attributes:
        rank: global rank.
        state: ``running``, ``parking`` (the gate is closed), ``parked``, ``stopping``, ``ended``,
            or ``killed``, which only Slurm can tell.
        since: when it entered that state.
        started: when a process of this rank first came in this attempt.
        as_of: when all of this was so.
        host, boot_id: where it runs, and since which boot of that machine.
        pid: its process; changes over requeues.
        job_id: Slurm's, None outside of a job.
        restart_count: how often the job had been requeued.
        causes: why it is held; empty while running.
        request_mono_ns: when the latest request came that closed or opened the gate, changed the
            causes or asked for a stop; 0 before the first.
        pauses: how many pauses this attempt has had.
        park_us: latency of the latest park, microseconds; None before the first.
        held: threads that were held at the gate, at the latest park or resume.
        resume_us: latency of the latest resume, until the first operator ran; None before that.
        world_size: ranks that this one is joined with, itself included; 1 while it is alone.
        all_parked: since when all of them are parked at the same collectives; None otherwise.
        in_flight: collectives in flight at that time; None if unknown.
        vacated_bytes: device memory that is on the host now; 0 while it is not.
        vacate_s, restore_s: how long the latest move took, there and back; None before the first.
        not_vacated: why the memory of the present pause, or of the latest, is where it is.
        is_lost: its device memory could not be given back: it cannot train on.
        step: training step, None when the rank never told.
        step_since: when the step was first seen to be this one; late by one heartbeat at the most.
        steps_per_s: over the latest interval in which the step changed; None before.
        samples_per_step: of all ranks together; None where the loader does not say.
        first_collective_s: from the begin of a step to its first collective, the median of the
            latest samples; None of a rank that is alone, or issues none.
        heartbeat_s: upper bound between two writes of the status; None without a heartbeat.
        collectives: how many it has issued on its largest process group; told where the ranks are
            started anew in each generation of an elastic run.
        collective_timeout_s: of that group; None where it is not known.
        meeting_timeout_s: its main thread is in ``init_process_group``, which fails after so long;
            None: it is not there.
        error: uncaught error that ended its script; empty otherwise.
        met: before that it had met the other ranks.
        lost_peer: the error is a lost connection to another rank.
        stands_at: the main thread's place in the script, once a heartbeat saw no progress.
        saver: who saves at a stop: ``attempt_began`` (a Run) or ``stops_taken`` (the script, with
            the two calls); empty if nothing does.
        saver_restart_count: in which attempt it said so.
        attempt_step: step at which its newest Run began; None without one.
        attempt_began: when.
        attempt_restart_count: in which attempt.
        committed_step: newest durably saved step; None if there is none, or it is not reported.
        committed: when.
        save_s: the longest durable save so far, seconds.
        not_copied: why its last save held the training up until it was written; None where it was
            copied.
        preempted: restart counts of the attempts of this job that were preempted, each with when
            the rank heard of it (epoch ns).
        requeue: why the job could not be requeued, empty once it has been; None before that.
        finished: its training is done.
        pause_counts: how many pauses took how long until the rank was parked, over all attempts:
            one count per bucket of :data:`PAUSE_BOUNDS_S`.
        pause_sum_s: how long they took together.
        time: where the time of this attempt went; rank 0 alone tells it, for all.
        account: of the attempts before it.
        v: version of the file.
    """

    rank: Rank
    state: State
    since: Moment
    started: Moment = NEVER
    as_of: Moment = NEVER
    host: Text = ""
    boot_id: Text = ""
    pid: Small = 0
    job_id: Integer | None = None
    restart_count: Small = 0
    causes: tuple[Text, ...] = ()
    request_mono_ns: Count = 0
    pauses: Count = 0
    park_us: Duration | None = None
    held: Count = 0
    resume_us: Duration | None = None
    world_size: Rank = 1
    all_parked: Moment | None = None
    in_flight: Count | None = 0
    vacated_bytes: Count = 0
    vacate_s: Seconds | None = None
    restore_s: Seconds | None = None
    not_vacated: Text | None = None
    is_lost: bool = False
    step: Integer | None = None
    step_since: Moment | None = None
    steps_per_s: Seconds | None = None
    samples_per_step: Count | None = None
    first_collective_s: Seconds | None = None
    heartbeat_s: Seconds | None = None
    collectives: Count | None = None
    collective_timeout_s: Seconds | None = None
    stands_at: Text = ""
    meeting_timeout_s: Seconds | None = None
    error: Text = ""
    met: bool = True
    lost_peer: bool = False
    saver: Saver = ""
    saver_restart_count: Small = 0
    attempt_step: Integer | None = None
    attempt_began: Moment | None = None
    attempt_restart_count: Small = 0
    committed_step: Count | None = None
    committed: Moment | None = None
    save_s: Seconds | None = None
    not_copied: Text | None = None
    preempted: tuple[tuple[Count, Count], ...] = ()
    requeue: Text | None = None
    finished: bool = False
    pause_counts: PauseCounts = (0,) * (len(PAUSE_BOUNDS_S) + 1)
    pause_sum_s: Seconds = 0.0
    time: AttemptTime | None = None
    account: Account | None = None
    v: Literal[1] = 1

    @property
    def message(self) -> str:
        """The state, of no more than is in it."""
        return f"{self.state} together" if self.parked_together else self.state

    @property
    def vacated_message(self) -> str:
        """Where its device memory is; empty where that is nothing to tell."""
        if self.is_lost:
            return f"device memory lost: {self.not_vacated}"
        if self.vacated_bytes:
            return f"{self.vacated_bytes / 1e9:.2f} GB of device memory are on the host"
        if self.not_vacated and self.state == "parked":
            return f"not vacated: {self.not_vacated}"
        return ""

    @property
    def parked_together(self) -> bool:
        """Whether all ranks are held, none of them before a collective that another is in."""
        return self.state == "parked" and self.all_parked is not None

    def goodput(self) -> Goodput | None:
        """Of all attempts, up to when the file was written; None of any rank but the first."""
        return None if self.time is None else self.accounted().result()

    def accounted(self) -> Account:
        """The attempts before this one, and this one."""
        account, time = copy.deepcopy((self.account or Account(), self.time or AttemptTime()))
        time.pass_until(self.as_of.mono_ns)
        time.step = self.step
        begin_ns = self.as_of.epoch_ns - self.as_of.mono_ns + time.first_ns
        account.add(time, begin_s=begin_ns / 1e9)
        return account

    def to_json(self) -> str:
        """The content of its file."""
        return encode(self).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """Decode an untrusted file; callers may rely on the types of the result.

        Raises:
            ValueError: no status, or one of another version.
        """
        try:
            return decode(cls, text)
        except ValueError as error:
            raise ValueError(
                f"this is no status of a rank, or of another version of hydroslurm: {error}"
            ) from None


# --- the fold ------------------------------------------------------------------------------------

_ENTERS: dict[EventKind, State] = {
    EventKind.INSTALLED: "running",
    EventKind.GATE_CLOSED: "parking",
    EventKind.PARKED: "parked",
    EventKind.RESUMED: "running",
    EventKind.STOP_REQUESTED: "stopping",
    EventKind.UNINSTALLED: "ended",
}


def fold(events: Iterable[Event], status: RankStatus | None = None) -> RankStatus | None:
    """The status after the last event; None when there is no event."""
    for event in events:
        status = after(status, event)
    return status


def after(status: RankStatus | None, event: Event) -> RankStatus:
    """The status after one more event; of any event that :meth:`Event.from_json` has read. Pure."""
    if status is None or event.kind is EventKind.INSTALLED:
        status = _begin(status, event)
    changes = {
        "as_of": Moment.of(event),
        "pid": event.pid,
        "host": event.host,
        "job_id": event.job_id,
        "restart_count": event.restart_count,
        "causes": tuple(event.data.get("causes", status.causes)),
        "pauses": event.data.get("pause", status.pauses),
        **_step_changes(status, event),
        **_changes(status, event),
    }
    if status.time is not None:
        changes["time"] = time = copy.deepcopy(status.time)
        time.add(event)
    entered = _ENTERS.get(event.kind, status.state)
    # a stop opens the gate: what follows it is the way out, not a return to running
    if entered != status.state and (status.state, entered) != ("stopping", "running"):
        changes |= {"state": entered, "since": Moment.of(event)}
    return replace(status, **changes)


def _begin(before: RankStatus | None, event: Event) -> RankStatus:
    """Of a process that starts: what was saved stays saved, and the histogram only grows."""
    boot = event.data.get("boot")
    now = Moment.of(event)
    status = RankStatus(
        event.rank, "running", now, now, boot_id=boot if isinstance(boot, str) else ""
    )
    if event.rank == 0:
        status = replace(status, time=AttemptTime(event.mono_ns, event.mono_ns))
    if before is None:
        return status
    is_same_clock = (before.host, before.boot_id) == (event.host, status.boot_id)
    is_same_job = before.job_id == event.job_id
    # another job in the same folder has its own restarts: nobody in it has said yet that they save
    of_job = before if is_same_job else status
    is_same_attempt = is_same_job and before.restart_count == event.restart_count

    # a process that installs again before its Run has begun
    is_same_process = is_same_clock and is_same_attempt and before.pid == event.pid
    goes_on = event.rank or (is_same_process and before.time and before.time.began_step is None)

    def told(moment: Moment | None) -> Moment | None:
        return moment if moment is None or is_same_clock else Moment(0, moment.epoch_ns)

    return replace(
        status,
        started=before.started if is_same_attempt and is_same_clock else now,
        saver=of_job.saver,
        saver_restart_count=of_job.saver_restart_count,
        attempt_step=of_job.attempt_step,
        attempt_began=told(of_job.attempt_began),
        attempt_restart_count=of_job.attempt_restart_count,
        committed_step=before.committed_step,
        committed=told(before.committed),
        save_s=before.save_s,
        preempted=of_job.preempted,
        finished=before.finished,
        pause_counts=before.pause_counts,
        pause_sum_s=before.pause_sum_s,
        time=before.time if goes_on else status.time,
        account=before.account if goes_on else before.accounted(),
    )


def _step_changes(status: RankStatus, event: Event) -> dict[str, Any]:
    """Without a heartbeat, two events with different steps tell the rate."""
    since, rate = status.step_since, status.steps_per_s
    if event.step is None or event.step == status.step:
        return {}
    if status.heartbeat_s is None and status.step is not None and since is not None:
        took_s = (event.mono_ns - since.mono_ns) / 1e9
        rate = max(0.0, (event.step - status.step) / took_s) if took_s > 0 else rate
    return {"step": event.step, "step_since": Moment.of(event), "steps_per_s": rate}


def _changes(status: RankStatus, event: Event) -> dict[str, Any]:
    """What an event of its kind changes."""
    kind, data, now = event.kind, event.data, Moment.of(event)
    reason = str(data.get("reason") or "")[:_MOST_TEXT]
    requested = {"request_mono_ns": data.get("requested_mono_ns") or event.mono_ns}
    # two threads write: the line of a closing may follow that of the agreement which came of it
    is_older = status.all_parked is not None and event.mono_ns <= status.all_parked.mono_ns
    apart = {"all_parked": status.all_parked if is_older else None}
    match kind:
        # --- pauses
        case EventKind.GATE_CLOSED:
            return {**requested, **apart, "not_vacated": None}
        case EventKind.CAUSES_CHANGED | EventKind.STOP_REQUESTED:
            return requested
        case EventKind.PARKED:
            world_size = data.get("world_size", status.world_size)
            return {**_held(event), **_park_changes(status, event), "world_size": world_size}
        case EventKind.RESUMED:
            # a rank whose memory is given back first opens its gate by a request of its own, long
            # after the one that asked for it
            return {**_held(event), **apart, **({} if "vacated" in status.causes else requested)}
        case EventKind.FIRST_OPERATOR_RELEASED if status.request_mono_ns:
            return {"resume_us": (event.mono_ns - status.request_mono_ns) / 1e3}
        # --- where the device's memory is
        case EventKind.VACATED:
            moved_bytes, took_s = data.get("moved_bytes", 0), data.get("vacate_s")
            return {"vacated_bytes": moved_bytes, "vacate_s": took_s, "not_vacated": None}
        case EventKind.NOT_VACATED | EventKind.RESTORE_FAILED:
            is_lost = status.is_lost or bool(data.get("lost"))
            return {"vacated_bytes": 0, "not_vacated": reason or None, "is_lost": is_lost}
        case EventKind.RESTORED:
            return {"vacated_bytes": 0, "restore_s": data.get("restore_s")}
        # --- several ranks
        case EventKind.RANKS_JOINED:
            return {"world_size": data.get("world_size", status.world_size)}
        case EventKind.AGREEMENT_FAILED | EventKind.COORDINATOR_LOST:
            is_alone = data.get("what") == "connection"
            return {"world_size": 1 if is_alone else status.world_size, "all_parked": None}
        case EventKind.ALL_PARKED:
            return {"all_parked": now, "in_flight": data.get("in_flight")}
        # --- a Run, or the two calls
        case EventKind.STOPS_TAKEN:
            return {"saver": "stops_taken", "saver_restart_count": event.restart_count}
        case EventKind.ATTEMPT_BEGAN:
            return {
                "saver": "attempt_began",
                "saver_restart_count": event.restart_count,
                "attempt_step": _integer(data.get("step")) or 0,
                "attempt_began": now,
                "attempt_restart_count": event.restart_count,
            }
        case EventKind.FIRST_STEP:
            return {"samples_per_step": _integer(data.get("samples_per_step"))}
        case EventKind.UNINSTALLED:
            return {
                "error": str(data.get("error") or "")[:_MOST_TEXT],
                "met": data.get("met") is not False,
                "lost_peer": data.get("lost_peer") is True,
            }
        case EventKind.SAVE_COMMITTED:
            return _save_changes(status, event)
        case EventKind.SAVE_STAGED:
            return {"not_copied": None}
        case EventKind.SAVE_NOT_COPIED:
            return {"not_copied": reason or data.get("reason")}
        case EventKind.STOP_REASON if reason == "preempted":
            others = [one for one in status.preempted if one[0] != event.restart_count]
            preempted = [*others, (event.restart_count, event.epoch_ns)][-_MOST_PREEMPTIONS:]
            return {"preempted": tuple(preempted)}
        case EventKind.REQUEUED:
            return {"requeue": ""}
        case EventKind.REQUEUE_FAILED:
            return {"requeue": reason or "unknown"}
        case EventKind.RUN_FINISHED:
            return {"finished": True}
    return {}


def _held(event: Event) -> dict[str, Any]:
    return {"held": max(0, _integer(event.data.get("held")) or 0), "resume_us": None}


def _park_changes(status: RankStatus, event: Event) -> dict[str, Any]:
    """How long it took to park. A rank that is let through to a collective parks again: the first
    time is what was measured."""
    if status.state == "parked":
        return {}
    if "park_us" not in event.data:
        return {"park_us": None}
    park_us = float(event.data["park_us"])
    counts = list(status.pause_counts)
    counts[bisect.bisect_left(PAUSE_BOUNDS_S, park_us / 1e6)] += 1
    sum_s = status.pause_sum_s + max(0.0, park_us / 1e6)
    return {"park_us": park_us, "pause_counts": tuple(counts), "pause_sum_s": sum_s}


def _save_changes(status: RankStatus, event: Event) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if (step := event.data.get("checkpoint_step")) is not None:
        changes |= {"committed_step": step, "committed": Moment.of(event)}
    if (took_s := event.data.get("seconds")) is not None:
        changes["save_s"] = max(status.save_s or 0.0, float(took_s))
    return changes


def _integer(value: Any) -> int | None:
    """None also for a flag, which other events have under these names."""
    return value if type(value) is int else None


# --- the file ------------------------------------------------------------------------------------


def status_of(log: Path) -> Path:
    """The status beside an event log."""
    return log.with_suffix(".json")


def load_status(path: Path | str) -> RankStatus:
    """The status in a file, as it was written.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is no status, or one of another version.
    """
    return RankStatus.from_json(read_regular(path, limit_bytes=LIMIT_BYTES))


def read_status(path: Path | str) -> RankStatus | None:
    """The status in a file; None when there is none that can be read."""
    try:
        return load_status(path)
    except (OSError, ValueError):
        return None
