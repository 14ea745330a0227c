"""Pause, resume and requeue a whole job: Slurm's side and the ranks' side together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hydroslurm.core.ack import (
    Answer,
    Judge,
    judge_pause,
    judge_resume,
    judge_stop,
    judge_vacate,
    wait_for_answers,
)
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.jobid import JobId
from hydroslurm.core.signals import signal_name
from hydroslurm.core.status import RankStatus, read_status, status_of
from hydroslurm.errors import (
    NotPermitted,
    TargetError,
    WrongJobState,
)
from hydroslurm.gate.signals import is_ours_alone
from hydroslurm.slurm.client import Job, JobState, SlurmClient
from hydroslurm.slurm.run_folders import run_dirs_of
from hydroslurm.vacate.request import ask_to_vacate


@dataclass(frozen=True)
class JobAnswer:
    """How a job's ranks answered.

    Attributes:
        job_id: what Slurm calls it.
        how: what was done: which command, and why not a better one.
        answers: of the ranks that answered in time.
        silent: ranks that did not.
    """

    job_id: JobId
    how: str
    answers: tuple[Answer, ...]
    silent: tuple[int, ...]


def pause_job(
    client: SlurmClient, job: Job, *, timeout_s: float = 10.0, vacate: bool = False
) -> JobAnswer:
    """Suspend a job where that is permitted, else signal its ranks; wait until every rank is
    parked. Only job steps are signalled whose ranks take it, and in which nobody dies of it.

    Args:
        job: as slurmctld has just described it.
        vacate: have the ranks move their device memory to the host as well, and wait for that.

    Raises:
        ControllerUnreachable ...: as the client.
        WrongJobState: the job does not run.
        TargetError: no rank of the job can answer, or none may be signalled, and why.
    """
    _must_be(job, JobState.RUNNING, "pause")
    _await_earlier_resume(job, timeout_s)

    def act() -> _Act:
        try:
            client.suspend(job)
            return _Act("scontrol suspend")
        except NotPermitted:
            done = _signal(client, job, "pause")
            return replace(
                done,
                how=f"{done.how}, because only operators may suspend; "
                "Slurm goes on counting the job as running",
            )

    if not vacate:
        return _ask(job, act, judge_pause, timeout_s)
    grace_s = client.config().suspend_grace_time_s
    number = time.time_ns()

    def prepare(log: Path) -> None:
        try:
            ask_to_vacate(log, number=number, grace_s=grace_s)
        except OSError as error:
            raise TargetError(
                f"job {job.id} was left alone: a rank cannot be asked to vacate: {error}"
            ) from error

    return _ask(job, act, judge_vacate, timeout_s, prepare=prepare)


def _await_earlier_resume(job: Job, timeout_s: float) -> None:
    """Wait until no rank of a job that runs, as Slurm says, is parked by Slurm any more.

    A suspend takes 2 s on the node, and the resume after it as long; what comes next may overtake
    that resume, and is lost: the job is SUSPENDED then, and trains (seen on 22.05).
    """
    deadline = time.monotonic() + timeout_s
    paths = [status_of(path) for path in _event_files(job).values()]
    while time.monotonic() < deadline:
        read = [now for path in paths if (now := read_status(path)) and _is_alive(now, job)]
        if not any("slurm" in now.causes for now in read):
            return
        time.sleep(_SETTLE_POLL_S)


_SETTLE_POLL_S = 0.05


def resume_job(client: SlurmClient, job: Job, *, timeout_s: float = 10.0) -> JobAnswer:
    """Undo :func:`pause_job`, whichever way it went; raises as it does."""
    if job.state is not JobState.SUSPENDED:
        _must_be(job, JobState.RUNNING, "resume")

    def act() -> _Act:
        if job.state is JobState.SUSPENDED:
            client.resume(job)
            return _Act("scontrol resume")
        return _signal(client, job, "resume")

    return _ask(job, act, judge_resume, timeout_s)


def requeue_job(client: SlurmClient, job: Job, *, timeout_s: float = 60.0) -> JobAnswer:
    """Have a job save, and be requeued once that is committed; nothing ends it before.

    ``scontrol requeue`` leaves a job KillWait to save in, this all the time that it needs. The
    ranks are sent the warning signal (SIGURG), which harms no process that does not know it.

    Raises:
        ControllerUnreachable ...: as the client.
        WrongJobState: the job does not run.
        TargetError: nobody in it would save.
    """
    if job.state is JobState.SUSPENDED:
        raise WrongJobState(
            f"cannot requeue job {job.id} gently: it is SUSPENDED, and a suspended job gets no "
            "signal. Resume it first (hydroslurm resume {job.id})"
        )
    _must_be(job, JobState.RUNNING, "requeue")
    read = (read_status(status_of(path)) for path in _event_files(job).values())
    if not any(one and one.saver and one.saver_restart_count == job.restart_count for one in read):
        raise TargetError(
            f"nobody in job {job.id} would save: its ranks use no hydroslurm.Run and no "
            f"receive_suspend_command(), or have not come to it yet ({_places(job)}). "
            f"`scontrol requeue {job.id.leader}` starts it again from what it has saved itself"
        )

    def act() -> _Act:
        client.signal(job, "URG")
        return _Act("scancel --signal=URG, and a requeue once the state is committed")

    is_requeued = False

    def judge(before: RankStatus, now: RankStatus, is_late: bool) -> Answer | None:
        """The requeue by one training kills the others, which have saved by then."""
        nonlocal is_requeued
        is_requeued = is_requeued or (now.requeue == "" and before.requeue is None)
        answer = judge_stop(before, now, is_late)
        if is_requeued and now.requeue is None and now.committed != before.committed:
            message = f"step {now.committed_step} committed; requeued with the job"
            return Answer(now.rank, True, message)
        return answer

    return _ask(job, act, judge, timeout_s)


@dataclass(frozen=True)
class _Act:
    """What was done. ``ranks``: who will answer; None for all."""

    how: str
    ranks: frozenset[Hashable] | None = None


def _signal(client: SlurmClient, job: Job, verb: Verb) -> _Act:
    """Ask by signal, each job step by the one that its ranks take.

    Raises:
        TargetError: in every step somebody would die of it, or take it for something else.
    """
    files = _event_files(job)
    found = listeners(files, verb, restart_count=job.restart_count)
    if not found.signals:
        raise TargetError(
            f"job {job.id} was not signalled, and was left alone. "
            f"{'; '.join(found.refusals) or 'No rank of it is there any more'}"
            + (f". Operators may `scontrol suspend {job.id.leader}`" if verb == "pause" else "")
        )
    for step_id, number in found.signals.items():
        client.signal(job, number, step=step_id)
    message = ", ".join(
        f"scancel --signal={signal_name(number).removeprefix('SIG')} {job.id.argument}.{step_id}"
        for step_id, number in found.signals.items()
    )
    left = "".join(f" (left alone: {reason})" for reason in found.refusals)
    return _Act(message + left, found.ranks)


def _event_files(job: Job) -> dict[tuple[int, int], Path]:
    """Of the ranks of all its trainings, by the number of the training and the rank."""
    found: dict[tuple[int, int], Path] = {}
    for number, run in enumerate(run_dirs_of(job)):
        try:
            found |= {(number, rank): path for rank, path in run.rank_event_files().items()}
        except OSError as error:
            raise TargetError(
                f"job {job.id} was left alone: {run.events} cannot be looked at "
                f"({error.strerror}), so that no answer of its ranks would be seen. Its owner can "
                "do it"
            ) from error
    return found


def _places(job: Job) -> str:
    """Where its ranks write."""
    return ", ".join(str(run.events) for run in run_dirs_of(job))


def _ask(
    job: Job,
    act: Callable[[], _Act],
    judge: Judge,
    timeout_s: float,
    *,
    prepare: Callable[[Path], None] | None = None,
) -> JobAnswer:
    logs = _event_files(job)
    read = {rank: read_status(status_of(path)) for rank, path in logs.items()}
    alive = {rank: now for rank, now in read.items() if now is not None and _is_alive(now, job)}
    if not alive:
        raise TargetError(
            f"no rank of job {job.id} has announced itself in {_places(job)}. It may still be "
            "starting, or hydroslurm is not "
            "installed in it (start it with `hydroslurm submit`). It was left alone"
        )
    if prepare is not None:
        for rank in alive:
            prepare(logs[rank])
    done = act()
    if done.ranks is not None:
        alive = {rank: now for rank, now in alive.items() if rank in done.ranks}
    before = {rank: (status_of(logs[rank]), now) for rank, now in alive.items()}
    answers = wait_for_answers(before, judge, timeout_s=timeout_s)
    names = [f" ({run.root.name})" for run in run_dirs_of(job)]
    if len({number for number, _ in alive}) == 1:
        names = [""] * len(names)
    return JobAnswer(
        job.id,
        done.how,
        tuple(
            replace(one, message=one.message + names[number])
            for (number, _), one in sorted(answers.items())
        ),
        tuple(rank for _, rank in sorted(alive.keys() - answers.keys())),
    )


def _is_alive(status: RankStatus, job: Job) -> bool:
    """Whether the rank wrote this in the present attempt; one that was killed wrote no end."""
    return status.state != "ended" and status.restart_count == job.restart_count


def _must_be(job: Job, state: JobState, verb: str) -> None:
    if job.state is not state:
        raise WrongJobState(
            f"cannot {verb} job {job.id}: it is {job.state.value}, and should be {state.value}"
        )


# --- which job steps hear a signal, and why the others are left alone
#
# ``scancel --signal`` reaches every process of a job step (under proctrack/linuxproc) or each of
# its tasks, and SIGUSR1 kills whoever does not know it, or means something else to them: Lightning
# saves and requeues. So it goes only to steps whose ranks have written down that they take it, and
# behind whom nobody would die of it.

Verb = Literal["pause", "resume"]


@dataclass
class _Step:
    """All that is known of one job step.

    Attributes:
        ranks: how each announced itself, by the key of its file.
        tasks: that have come so far, ended ones too.
        replaced: per rank the signals that others have a handler for.
    """

    ranks: dict[Hashable, Event] = field(default_factory=dict)
    tasks: set[int] = field(default_factory=set)
    replaced: dict[Hashable, set[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Listeners:
    """Whom a signal may be sent to.

    Attributes:
        signals: job step -> the number of the signal that its ranks take.
        ranks: the files' keys of those that will hear it.
        refusals: of each other step why it is left alone.
    """

    signals: Mapping[int, int]
    ranks: frozenset[Hashable]
    refusals: tuple[str, ...]


def listeners(files: Mapping[Any, Path], verb: Verb, *, restart_count: int) -> Listeners:
    """Read who has announced itself in the present attempt, in files under any names. Who wrote a
    file that cannot be read is not among them."""
    signals: dict[int, int] = {}
    ranks: set[Hashable] = set()
    refusals: list[str] = []
    for step_id, step in _steps(files, restart_count).items():
        reason = _why_not(step_id, step, verb)
        if reason:
            refusals.append(reason)
            continue
        signals[step_id] = _asked_by(next(iter(step.ranks.values())))[verb]
        ranks |= step.ranks.keys()
    return Listeners(signals, frozenset(ranks), tuple(refusals))


_BATCH = -1
"""In the place of a step, for what runs in the batch script."""


def _steps(files: Mapping[Any, Path], restart_count: int) -> dict[int, _Step]:
    steps: dict[int, _Step] = {}
    for key, path in files.items():
        of_pid: dict[tuple[str, int], _Step] = {}
        with contextlib.suppress(OSError):
            for event in read_events(path):
                if event.restart_count == restart_count:
                    _take(steps, of_pid, key, event)
    return {step_id: step for step_id, step in steps.items() if step.ranks}


def _take(
    steps: dict[int, _Step], of_pid: dict[tuple[str, int], _Step], key: Hashable, event: Event
) -> None:
    process = event.host, event.pid
    if event.kind is EventKind.INSTALLED:
        step_id = event.data.get("step_id")
        step = steps.setdefault(_BATCH if step_id is None else int(step_id), _Step())
        of_pid[process] = step
        step.ranks[key], step.replaced[key] = event, set()
        step.tasks.add(event.data.get("task", event.rank))
        return
    step = of_pid.get(process, _Step())
    known = step.ranks.get(key)
    if known is None or (known.host, known.pid) != process:
        return
    if event.kind is EventKind.HANDLER_REPLACED:
        of_others = {str(event.data.get("signal"))}
        step.replaced[key] -= of_others
        if not is_ours_alone(event.data):
            step.replaced[key] |= of_others
    elif event.kind is EventKind.UNINSTALLED:
        del step.ranks[key]


def _asked_by(announced: Event) -> Mapping[str, int]:
    """Verb -> the number of the signal that the rank takes for it."""
    asked_by: Mapping[str, int] = announced.data.get("asked_by", {})
    return asked_by


def _why_not(step_id: int, step: _Step, verb: Verb) -> str:
    """Empty where the signal harms nobody and every rank takes it."""
    if step_id == _BATCH:
        return (
            "its ranks run in the batch script without srun, where a signal would reach the batch "
            "shell too; start them with srun"
        )
    reasons = (_of_rank(key, step, verb) for key in step.ranks)
    reason = next(filter(None, reasons), "") or _of_signals(step, verb) or _of_tasks(step)
    return f"step {step_id}: {reason}" if reason else ""


def _of_rank(key: Hashable, step: _Step, verb: Verb) -> str:
    told = step.ranks[key]
    who = f"rank {told.rank} (pid {told.pid} on {told.host})"
    number = _asked_by(told).get(verb)
    if number is None:
        return f"{who} takes no signal for a {verb}: HYDROSLURM_SIGNALS, or it was ignored before"
    name = signal_name(number)
    if name in step.replaced[key]:
        return (
            f"{who} has another handler for {name} than hydroslurm's. What that does is not known: "
            "Lightning saves and requeues. Choose another signal, "
            f"HYDROSLURM_SIGNALS=user_{verb}=..., or have the library leave this one alone"
        )
    if deaf := told.data.get("deaf"):
        return (
            f"{name} would kill {', '.join(deaf)}, above {who}; start the script with "
            "srun itself, `exec` in the wrapper, or `hydroslurm agent` in the place of torchrun"
        )
    return ""


def _of_signals(step: _Step, verb: Verb) -> str:
    numbers = {_asked_by(told)[verb] for told in step.ranks.values()}
    if len(numbers) == 1:
        return ""
    names = ", ".join(sorted(map(signal_name, numbers)))
    return f"its ranks take different signals for a {verb} ({names})"


def _of_tasks(step: _Step) -> str:
    told = [one.data for one in step.ranks.values()]
    tasks = max((one.get("step_tasks", 0) for one in told), default=0)
    if len(step.tasks) >= tasks or all(one.get("held") for one in told):
        return ""
    return (
        f"{len(step.tasks)} of its {tasks} tasks have announced themselves, and the signal would "
        "kill the others. They may still be starting: try again. `srun --preempt` and "
        "HYDROSLURM_PREEMPT=pause protect tasks that start; helpers belong into a job step of "
        "their own"
    )
