"""A TrainingJob as its run folder and Slurm tell it together: what ``describe``
shows. Jobs without a spec: :mod:`~hydroslurm.jobs.control.plain_job`; all jobs in a line each:
:mod:`~hydroslurm.jobs.control.listing`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hydroslurm.core import agentstate
from hydroslurm.core.agentstate import AgentState
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.files import read_regular
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, load_status, status_of
from hydroslurm.errors import (
    ControllerUnreachable,
    LaunchError,
    NoSuchJob,
    RunFolderError,
    SlurmError,
    SlurmMissing,
    SpecError,
    UsageError,
)
from hydroslurm.jobs import submission
from hydroslurm.jobs.control.requests import find_job, ranks_dir_of, ranks_dirs_of, run_dirs_of
from hydroslurm.jobs.plan import Plan, read_plan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.submission import Submission
from hydroslurm.jobs.supervisor.attempts import (
    Attempt,
    Attempts,
    count_preemptions,
    count_restarts,
)
from hydroslurm.jobs.supervisor.conditions import (
    Condition,
    final_condition,
    newest_conditions,
    read_conditions,
)
from hydroslurm.jobs.supervisor.exit_policy import format_status
from hydroslurm.jobs.supervisor.job_step import TaskExits
from hydroslurm.jobs.supervisor.tensorboard import Address, read_address
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.run_folders import read_owner
from hydroslurm.slurm.values import Job, JobState

_MOST_BYTES = 16 << 20
"""Of a spec, and of the events that are searched for pauses."""


@dataclass(frozen=True)
class Found:
    """What is known of any job of hydroslurm.

    Attributes:
        run: its folder.
        slurm: as slurmctld or accounting has it; None when neither can tell.
        conditions: oldest first, with the pauses that its ranks have written down.
    """

    run: RunDir
    slurm: Job | None
    conditions: tuple[Condition, ...]

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more."""
        ended = self.slurm is not None and self.slurm.state.has_ended
        return ended or final_condition(self.conditions) is not None


@dataclass(frozen=True)
class Overview(Found):
    """Everything that is known of one job with a spec.

    Attributes:
        job: what was asked for.
        plan: what it is on Slurm; None when the submission was interrupted.
        attempts: oldest first.
        tensorboard: where it answers now.
    """

    job: TrainingJob
    plan: Plan | None
    attempts: tuple[Attempt, ...]
    tensorboard: Address | None

    @property
    def restarts(self) -> int:
        """Failed or completed attempts that another one followed: what backoffLimit allows."""
        return count_restarts(self.attempts)

    @property
    def preemptions(self) -> int:
        """What preemptionLimit is compared with."""
        return count_preemptions(self.attempts)


@dataclass(frozen=True)
class JobStatus:
    """A job as Slurm sees it, and its ranks as they see themselves.

    Attributes:
        ranks: of all trainings of the job, each in order of rank.
        silent: ranks that have written events, and why their status is not known.
        nodes: as their agents see them, where ranks were started by ``hydroslurm agent``.
        condition: what it is now; None while nobody has said anything.
        problem: why its run folder cannot be looked at.
        trainings: of each of ``ranks``, the name of its run folder, where the job has several.
    """

    job: Job
    run_dir: RunDir
    ranks: tuple[RankStatus, ...]
    silent: tuple[tuple[int, str], ...] = ()
    nodes: tuple[AgentState, ...] = ()
    condition: Condition | None = None
    problem: str | None = None
    trainings: tuple[str, ...] = ()


def locate(client: SlurmClient, which: str) -> tuple[RunDir, Job | None]:
    """The run folder and the job of a job id (``12``, ``12_3``) or a run folder; of the latter also
    where there is no Slurm.

    Raises:
        NoSuchJob, SlurmMissing, ControllerUnreachable: Slurm knows no such job, or cannot be asked.
        UsageError: it means all elements of an array.
    """
    try:
        job_id = JobId.parse(which)
    except UsageError:
        run = RunDir(Path(which).absolute())
        if not run.root.is_dir():
            raise NoSuchJob(
                f"{which!r} is neither the id of a job nor a run folder; an id is 44, or 44_3 for "
                "an element of an array"
            ) from None
        slurm = _job_of_folder(client, run)
        # another cluster may have a job of that number
        folders = () if slurm is None else run_dirs_of(slurm)
        is_its = any(one.root.resolve() == run.root.resolve() for one in folders)
        return run, slurm if is_its else None
    try:
        slurm = find_job(client, job_id)
    except (NoSuchJob, SlurmMissing, ControllerUnreachable) as error:
        message = f"{error}. Where the run folder of the job is known, give that in place of its id"
        raise type(error)(message) from None
    return ranks_dir_of(slurm), slurm


def read_overview(run: RunDir, slurm: Job | None) -> Overview:
    """Of the job with a spec whose run folder this is.

    Raises:
        RunFolderError: there is no spec in it that can be read.
    """
    pauses = all_pauses(first_rank_events(run))
    plan = None
    with contextlib.suppress(LaunchError):
        plan = read_plan(run.plan_json)
    return Overview(
        run=run,
        slurm=slurm,
        job=_job_in(run),
        plan=plan,
        conditions=in_order((*read_conditions(run.conditions_jsonl), *pauses), slurm),
        attempts=Attempts(run.starts_jsonl).all(),
        tensorboard=read_address(run.tensorboard_json),
    )


def job_status(job: Job) -> JobStatus:
    """Slurm's state beside the ranks' own; a rank that wrote no end of an ended job was killed."""
    run = ranks_dir_of(job)
    ranks: list[RankStatus] = []
    silent: list[tuple[int, str]] = []
    nodes: list[AgentState] = []
    condition = problem = None
    folders = ranks_dirs_of(job)
    names: list[str] = []
    for folder in folders:
        files: Mapping[int, Path] = {}
        try:
            files = folder.rank_event_files()
            nodes += _agents(job, folder)
        except OSError as error:
            problem = f"{folder.events}: {error.strerror}"
        for rank, path in files.items():
            try:
                ranks.append(load_status(status_of(path)))
                names.append(f"{folder.root.name}: " if len(folders) > 1 else "")
            except FileNotFoundError:
                silent.append((rank, "no status yet"))
            except OSError as error:
                silent.append((rank, f"its status cannot be read: {error.strerror}"))
            except ValueError as error:
                silent.append((rank, str(error)))
    if job.state.has_ended:
        ranks = [one if one.state == "ended" else replace(one, state="killed") for one in ranks]
    first = next((one for one in ranks if one.state != "ended"), next(iter(ranks), None))
    try:
        said = (*newest_conditions(run.conditions_jsonl), *pause_now(first))
        condition = newest(in_order(said, job))
    except RunFolderError as error:
        problem = problem or str(error)
    return JobStatus(
        job, run, tuple(ranks), tuple(silent), tuple(nodes), condition, problem, tuple(names)
    )


def _agents(job: Job, run: RunDir) -> tuple[AgentState, ...]:
    """Of the present attempt; another may have had more nodes."""
    found = (agentstate.latest(run.agent_events(node)) for node in range(len(job.nodes)))
    return tuple(one for one in found if one and one.restart_count == job.restart_count)


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


def _job_in(run: RunDir) -> TrainingJob:
    try:
        text = read_regular(run.job_yaml, limit_bytes=_MOST_BYTES).decode(errors="replace")
        return loads(text, name=str(run.job_yaml), folder=run.root).job
    except OSError as error:
        raise RunFolderError(f"cannot read {run.job_yaml}: {error.strerror}") from None
    except SpecError as error:
        raise RunFolderError(f"{run.job_yaml} was written by another version: {error}") from None


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


def _paused(epoch_ns: int, causes: Iterable[str], restart_count: int) -> Condition:
    why = ", ".join(causes)
    message = f"parked between two operators{f' for {why}' if why else ''}"
    return Condition("Paused", epoch_ns, "Parked", message, restart_count)


def _resumed(epoch_ns: int, restart_count: int) -> Condition:
    return Condition("Running", epoch_ns, "Resumed", "goes on in place", restart_count)


def first_rank_events(run: RunDir) -> list[Event]:
    """The newest of them, oldest first; nothing where they cannot be read."""
    try:
        files = run.rank_event_files()
        return list(read_events(files[min(files)], most_bytes=_MOST_BYTES)) if files else []
    except OSError:
        return []


def submission_of(run: RunDir) -> Submission | None:
    """What was asked for; None where hydroslurm did not submit it."""
    try:
        return submission.read(run.root)
    except RunFolderError:
        return None


def _job_of_folder(client: SlurmClient, run: RunDir) -> Job | None:
    asked, owner = submission_of(run), read_owner(run)  # an owner: of a default folder
    named = str(owner.job_id) if owner is not None else None
    if asked is not None:
        named = asked.job_id
    try:
        return find_job(client, JobId.parse(named)) if named is not None else None
    except (SlurmError, UsageError):
        return None


def replica_states(found: Overview) -> dict[str, str]:
    """Replica -> its state in the latest attempt: ``running``, ``ended with status 137 (SIGKILL)``
    and the like, in the order of ranks."""
    if found.plan is None:
        return {}
    if not found.attempts:
        return dict.fromkeys(found.plan.replicas, "not started yet")
    attempt = found.attempts[-1]
    ends = TaskExits(found.run.srun_log(attempt.number))
    ends.look()
    if attempt.ending is not None:
        otherwise = f"ended with attempt {attempt.number} ({attempt.ending.value})"
    else:
        otherwise = _unended(found)
    return {
        name: _state(found.plan, name, ends.statuses, otherwise) for name in found.plan.replicas
    }


def _unended(found: Overview) -> str:
    """Of an attempt whose end nobody has written down."""
    state = None if found.slurm is None else found.slurm.state
    if state is None or state in (JobState.RUNNING, JobState.SUSPENDED):
        return "running" if state is not JobState.SUSPENDED else "suspended"
    return "ended with the job" if state.has_ended else "interrupted"


def _state(plan: Plan, name: str, statuses: Mapping[int, int], otherwise: str) -> str:
    own = [number for number, task in enumerate(plan.tasks) if task.replica == name]
    ended = [statuses[number] for number in own if number in statuses]
    if len(ended) < len(own):
        return otherwise
    return f"ended with status {format_status(max(ended))}"
