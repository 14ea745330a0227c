"""A job of hydroslurm without a spec, as its run folder and Slurm tell it together: of ``hydroslurm
submit train.py``, an Executor, a batch script of one's own, ``srun --preempt``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hydroslurm.core.events import Event, EventKind
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.errors import RunFolderError, SlurmError
from hydroslurm.jobs.control.overview import (
    Found,
    Overview,
    all_pauses,
    first_rank_events,
    in_order,
    job_status,
    locate,
    read_overview,
    submission_of,
)
from hydroslurm.jobs.control.requests import member_of, ranks_dir_of
from hydroslurm.jobs.submission import Submission
from hydroslurm.jobs.supervisor.attempts import Attempt, condition_reason, recorded_stop_reason
from hydroslurm.jobs.supervisor.conditions import Condition, ConditionType
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.stops import StopReason
from hydroslurm.slurm.values import Job, JobState

_BEFORE_NS = 5 * 10**9
"""Slurm tells the start of an attempt in whole seconds, by the controller's clock."""


@dataclass(frozen=True)
class PlainAttempt:
    """One start of the job.

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


@dataclass(frozen=True)
class PlainJob(Found):
    """Everything that is known of one job without a spec.

    Attributes:
        submission: what was asked for; None where hydroslurm did not submit it.
        ranks: those that have announced themselves.
        attempts: oldest first; none where neither accounting nor a rank tells.
        saver: the event that says who saves at a stop; None while nobody does.
        committed: the newest checkpoint of its Run; None while there is none.
    """

    submission: Submission | None
    ranks: tuple[RankStatus, ...]
    attempts: tuple[PlainAttempt, ...]
    saver: EventKind | None
    committed: Event | None

    @property
    def name(self) -> str:
        """The job's."""
        told = self.slurm.name if self.slurm is not None else ""
        return told or (self.submission.name if self.submission else self.run.root.name)

    @property
    def preemptions(self) -> int:
        """Attempts that Slurm has preempted, as far as its ranks or accounting tell."""
        known = {one.restart_count for one in self.conditions if one.type == "Preempted"}
        return len(
            known | {one.restart_count for one in self.attempts if one.message[:9] == "preempted"}
        )


def job_of(client: SlurmClient, which: str) -> Overview | PlainJob:
    """The job of an id or a run folder, with a spec or without.

    Raises:
        NoSuchJob, SlurmMissing, ControllerUnreachable: as :func:`locate`.
        RunFolderError: it is no job of hydroslurm's, or its run folder cannot be read.
    """
    run, slurm = locate(client, which)
    try:
        if os.path.lexists(run.job_yaml):
            return read_overview(run, slurm)
        require_ours(client, run, slurm, which)
    except PermissionError:
        raise RunFolderError(f"{run.root} is its owner's (0700): do this as that user") from None
    return _read(run, slurm, _history(client, slurm))


def _is_ours(run: RunDir) -> bool:
    """Whether it has been submitted, or has ranks or, of an elastic run, a coordinator."""
    return run.submission_json.exists() or run.events.is_dir() or run.elastic.is_dir()


def require_ours(client: SlurmClient, run: RunDir, slurm: Job | None, which: str) -> None:
    """Require that hydroslurm has a part in a job, or in another element of its array: one that has
    not started has no run folder.

    Raises:
        RunFolderError: it has none.
    """
    if _is_ours(run) or (slurm is not None and member_of(slurm) is not None):
        return
    if slurm is not None and slurm.array_job_id is not None and slurm.state.is_waiting:
        others = client.jobs_of(JobId(slurm.array_job_id))
        if any(_is_ours(ranks_dir_of(one)) for one in others):
            return
    if slurm is None:
        raise RunFolderError(
            f"{run.root} is not a run folder: neither {run.events.name}/ nor "
            f"{run.submission_json.name} is in it"
        )
    why = " yet (%s): it has not come to its `import torch`, or hydroslurm is not in it"
    if slurm.state.has_ended:
        why = " (%s): hydroslurm was not in it"
    raise RunFolderError(
        f"job {which} has no run folder{why % run.root}. `scontrol show job {slurm.id}` says "
        "what Slurm knows; hydroslurm submit, or srun --preempt in the batch script, makes the "
        "next one preemptible"
    )


def _history(client: SlurmClient, slurm: Job | None) -> tuple[Job, ...]:
    try:
        return client.history(slurm.id) if slurm is not None else ()
    except SlurmError:  # no accounting, or none yet
        return ()


def _read(run: RunDir, slurm: Job | None, records: Sequence[Job]) -> PlainJob:
    events = first_rank_events(run)
    if slurm is not None:  # a named folder may have had other jobs
        events = [event for event in events if event.job_id == slurm.job_id]
    kinds = {event.kind for event in events}
    savers = (EventKind.ATTEMPT_BEGAN, EventKind.STOPS_TAKEN)
    saves = [one for one in events if one.kind is EventKind.SAVE_COMMITTED]
    return PlainJob(
        run=run,
        slurm=slurm,
        conditions=in_order((*_conditions(events), *all_pauses(events), *of_slurm(slurm)), slurm),
        submission=submission_of(run),
        ranks=_ranks(run, slurm),
        attempts=tuple(_attempts(run, events, records)),
        saver=next((kind for kind in savers if kind in kinds), None),
        committed=next(reversed(saves), None),
    )


def _ranks(run: RunDir, slurm: Job | None) -> tuple[RankStatus, ...]:
    if slurm is not None:
        return job_status(slurm).ranks if ranks_dir_of(slurm) == run else ()
    found = (read_status(path) for path in run.rank_status_files().values())
    return tuple(one for one in found if one is not None)


def _conditions(events: Sequence[Event]) -> Iterator[Condition]:
    """Running and Preempted, as the first rank has written them down."""
    running: set[int] = set()
    numbers = _numbers(events)
    for event in events:
        restart_count = event.restart_count
        if event.kind is EventKind.INSTALLED and restart_count not in running:
            running.add(restart_count)
            number = numbers.get(restart_count)
            yield started(event.epoch_ns, restart_count, event.host, number)
        if event.kind is EventKind.STOP_REASON and event.data.get("reason") == "preempted":
            message = str(event.data.get("message", ""))
            yield preempted(event.epoch_ns, restart_count, message)


def started(epoch_ns: int, restart_count: int, host: str, number: int | None = None) -> Condition:
    """Its process on the first rank has begun."""
    message = f"attempt {number or restart_count + 1} on {host}"
    return Condition("Running", epoch_ns, "Started", message, restart_count)


def preempted(epoch_ns: int, restart_count: int, message: str = "") -> Condition:
    """A rank was told so."""
    return Condition("Preempted", epoch_ns, "Preempted", message, restart_count)


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


def _attempts(
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
