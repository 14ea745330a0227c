"""What became of a job, and when: its conditions and its attempts, from the events and the status
of its first rank, from Slurm, and from accounting. Pure, but for the reasons of stops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus
from hydroslurm.jobs.supervisor.attempts import Attempt, condition_reason, recorded_stop_reason
from hydroslurm.jobs.supervisor.conditions import Condition, ConditionType, final_condition
from hydroslurm.slurm.policy import StopReason
from hydroslurm.slurm.values import Job, JobState

_BEFORE_NS = 5 * 10**9
"""Slurm tells the start of an attempt in whole seconds, by the controller's clock."""


@dataclass(frozen=True)
class PlainAttempt:
    """One start of a job without a spec.

    Attributes:
        number: from 1, as the Run on its first rank has recorded it; of an attempt without a Run,
            Slurm's count of restarts plus one.
        restart_count: Slurm's.
        began_epoch_s, ended_epoch_s: when, as accounting has it; None while it is not known.
        step: the newest training step that its first rank has told; None when it tells none.
        message: how it ended.
    """

    number: int
    restart_count: int
    began_epoch_s: float | None
    ended_epoch_s: float | None
    step: int | None
    message: str


# --- conditions ----------------------------------------------------------------------------------


def in_order(conditions: Iterable[Condition], slurm: Job | None) -> tuple[Condition, ...]:
    """Oldest first, and at the end a suspension that no rank has told of."""
    found = sorted(conditions, key=lambda one: one.epoch_ns)
    is_paused = bool(found) and found[-1].type == "Paused"
    if slurm is not None and slurm.state is JobState.SUSPENDED and not is_paused:
        since_ns = (slurm.suspend_epoch_s or 0) * 10**9
        message = "suspended by Slurm; no rank of it has said that it is parked"
        found.append(Condition("Paused", since_ns, "Suspended", message, slurm.restart_count))
    return tuple(found)


def newest(conditions: tuple[Condition, ...]) -> Condition | None:
    """What a job is now: the verdict, else the newest."""
    return final_condition(conditions) or (conditions[-1] if conditions else None)


def all_pauses(events: Iterable[Event]) -> Iterator[Condition]:
    """Paused and Running again, from the first rank's events: the supervisor is suspended together
    with the ranks and can write nothing."""
    for event in events:
        if event.kind is EventKind.PARKED:
            yield _paused(event.epoch_ns, event.data.get("causes", ()), event.restart_count)
        elif event.kind is EventKind.RESUMED:
            yield _resumed(event.epoch_ns, event.restart_count)


def pause_now(first: RankStatus | None) -> Iterator[Condition]:
    """The newest of :func:`all_pauses`, from the first rank's status; none where it has not been
    paused, or has left."""
    if first is None:
        return
    if first.state == "parked":
        yield _paused(first.since.epoch_ns, first.causes, first.restart_count)
    elif first.state == "running" and first.pauses:
        yield _resumed(first.since.epoch_ns, first.restart_count)


def of_ranks(events: Sequence[Event]) -> Iterator[Condition]:
    """Running and Preempted, as the first rank has written them down."""
    running: set[int] = set()
    numbers = _numbers(events)
    for event in events:
        restart_count = event.restart_count
        if event.kind is EventKind.INSTALLED and restart_count not in running:
            running.add(restart_count)
            number = numbers.get(restart_count)
            yield _started(event.epoch_ns, restart_count, event.host, number)
        if event.kind is EventKind.STOP_REASON and event.data.get("reason") == "preempted":
            message = str(event.data.get("message", ""))
            yield _preempted(event.epoch_ns, restart_count, message)


def of_status(first: RankStatus | None) -> Iterator[Condition]:
    """The same from the first rank's status, which names no reason."""
    if first is not None:
        yield _started(first.started.epoch_ns, first.restart_count, first.host)
        yield from (_preempted(epoch_ns, count) for count, epoch_ns in first.preempted)


def of_slurm(slurm: Job | None) -> Iterator[Condition]:
    """That it waits or has ended, which no rank can write down."""
    if slurm is None:
        return
    number, reason = slurm.restart_count, slurm.state.value.title().replace("_", "")
    if slurm.state.is_waiting:
        yield Condition("Queued", (slurm.submit_epoch_s or 0) * 10**9, reason, slurm.reason, number)
    elif slurm.state.has_ended:
        kind: ConditionType = "Succeeded" if slurm.state is JobState.COMPLETED else "Failed"
        status = f"status {slurm.exit_code}" if slurm.exit_code else ""
        ended_ns = (slurm.end_epoch_s or 0) * 10**9
        yield Condition(kind, ended_ns, "" if reason == kind else reason, status, number)


def _paused(epoch_ns: int, causes: Iterable[str], restart_count: int) -> Condition:
    why = ", ".join(causes)
    message = f"parked between two operators{f' for {why}' if why else ''}"
    return Condition("Paused", epoch_ns, "Parked", message, restart_count)


def _resumed(epoch_ns: int, restart_count: int) -> Condition:
    return Condition("Running", epoch_ns, "Resumed", "goes on in place", restart_count)


def _started(epoch_ns: int, restart_count: int, host: str, number: int | None = None) -> Condition:
    """Its process on the first rank has begun."""
    message = f"attempt {number or restart_count + 1} on {host}"
    return Condition("Running", epoch_ns, "Started", message, restart_count)


def _preempted(epoch_ns: int, restart_count: int, message: str = "") -> Condition:
    """A rank was told so."""
    return Condition("Preempted", epoch_ns, "Preempted", message, restart_count)


# --- attempts of a job without a spec ------------------------------------------------------------


def attempts_of(
    run: RunDir, events: Sequence[Event], records: Sequence[Job]
) -> Iterator[PlainAttempt]:
    """As accounting counts them, else those that the first rank has seen."""
    numbers = _numbers(events)
    for record in records:
        if record.start_epoch_s is None:
            continue  # it waits for its nodes
        ended_s = record.end_epoch_s if record.state.has_ended or record.state.is_waiting else None
        yield PlainAttempt(
            numbers.get(record.restart_count, record.restart_count + 1),
            record.restart_count,
            record.start_epoch_s,
            ended_s,
            _step(events, record.restart_count),
            _how(run, record),
        )
    for count in sorted({event.restart_count for event in events}) if not records else ():
        began_ns = min(one.epoch_ns for one in events if one.restart_count == count)
        number = numbers.get(count, count + 1)
        known = recorded_stop_reason(run.events, Attempt(number, count, began_ns))
        message = (
            f"{condition_reason(known[0]).lower()}: {known[1]}" if known else "its end is not known"
        )
        yield PlainAttempt(number, count, began_ns / 1e9, None, _step(events, count), message)


def _numbers(events: Iterable[Event]) -> dict[int, int]:
    """Slurm's restart count -> the number of the attempt, where a Run has recorded one."""
    began = (one for one in events if one.kind is EventKind.ATTEMPT_BEGAN)
    found = ((one.restart_count, one.data.get("attempt")) for one in began)
    return {count: number for count, number in found if type(number) is int}


def _step(events: Iterable[Event], restart_count: int) -> int | None:
    steps = [
        one.step for one in events if one.restart_count == restart_count and one.step is not None
    ]
    return max(steps, default=None)


def _how(run: RunDir, record: Job) -> str:
    """Why an attempt ended: as its ranks were told when they were signalled, else as accounting has
    it, which takes a requeue that a rank asks for after a preemption for a requeue."""
    status = f", status {record.exit_code}" if record.exit_code else ""
    told = f"{record.state.value.lower()}{status}"
    if not (record.state.has_ended or record.state.is_waiting):
        return told
    began_ns = (record.start_epoch_s or 0) * 10**9 - _BEFORE_NS
    known = recorded_stop_reason(
        run.events, Attempt(record.restart_count + 1, record.restart_count, began_ns)
    )
    if known is None or record.state.value not in ("REQUEUED", "PREEMPTED"):
        return told
    if known[0] is StopReason.REQUEUED and record.state is JobState.PREEMPTED:
        return told  # a preemption without grace, which the ranks could not tell from a requeue
    return f"{condition_reason(known[0]).lower()}: {known[1]}"
