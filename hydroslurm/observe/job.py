"""One job as its run folder and Slurm tell it together: what ``status``, ``describe``, ``list``,
``logs`` and ``attach`` show or need. How it came about: :mod:`~hydroslurm.observe.history`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.files import read_regular
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, load_status, read_status, status_of
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
from hydroslurm.jobs.control.requests import (
    find_job,
    member_of,
    ranks_dir_of,
    ranks_dirs_of,
    run_dir_of,
)
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
    read_conditions,
)
from hydroslurm.jobs.supervisor.exit_policy import format_status
from hydroslurm.jobs.supervisor.job_step import TaskExits
from hydroslurm.jobs.supervisor.tensorboard import Address, read_address
from hydroslurm.observe.history import (
    PlainAttempt,
    all_pauses,
    attempts_of,
    in_order,
    newest,
    of_ranks,
    of_slurm,
    of_status,
    pause_now,
)
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.run_folders import read_owner, run_dirs_of
from hydroslurm.slurm.values import Job, JobState

_MOST_BYTES = 16 << 20
"""Of a spec, and of the events that are searched for pauses."""


@dataclass(frozen=True)
class RankViews:
    """The ranks of all trainings of a job, as they see themselves.

    Attributes:
        ranks: of each training in order of rank.
        trainings: of each of ``ranks``, the name of its run folder, where the job has several.
        silent: ranks that have written events, and why their status is not known.
        problem: why a run folder cannot be looked at.
    """

    ranks: tuple[RankStatus, ...] = ()
    trainings: tuple[str, ...] = ()
    silent: tuple[tuple[int, str], ...] = ()
    problem: str | None = None


class JobView:
    """A job, with a spec or without. Each part is read when it is first asked for: a line of
    ``list`` rests on a few small files, ``describe`` reads everything.

    Attributes:
        run: its folder.
        slurm: as slurmctld or accounting has it; None when neither can tell.
        records: its attempts in Slurm's accounting.
    """

    def __init__(self, run: RunDir, slurm: Job | None, *, records: Sequence[Job] = ()) -> None:
        self.run = run
        self.slurm = slurm
        self.records = records

    @cached_property
    def has_spec(self) -> bool:
        return os.path.lexists(self.run.job_yaml)

    @cached_property
    def spec(self) -> TrainingJob:
        """What was asked for, of a job with a spec.

        Raises:
            RunFolderError: it cannot be read.
        """
        path = self.run.job_yaml
        try:
            text = read_regular(path, limit_bytes=_MOST_BYTES).decode(errors="replace")
            return loads(text, name=str(path), folder=self.run.root).job
        except OSError as error:
            raise RunFolderError(f"cannot read {path}: {error.strerror}") from None
        except SpecError as error:
            raise RunFolderError(f"{path} was written by another version: {error}") from None

    @cached_property
    def plan(self) -> Plan | None:
        """What the spec is on Slurm; None when the submission was interrupted."""
        with contextlib.suppress(LaunchError):
            return read_plan(self.run.plan_json)
        return None

    @cached_property
    def submission(self) -> Submission | None:
        """What was asked for; None where hydroslurm did not submit it."""
        return submission_of(self.run)

    @property
    def name(self) -> str:
        told = self.slurm.name if self.slurm is not None else ""
        asked = self.submission
        if asked is not None and (self.has_spec or not told):
            return asked.name
        return told or self.run.root.name

    @cached_property
    def attempts(self) -> tuple[Attempt, ...]:
        """Of a job with a spec, as its supervisor has written them down; oldest first."""
        return Attempts(self.run.starts_jsonl).all()

    @cached_property
    def plain_attempts(self) -> tuple[PlainAttempt, ...]:
        """Of a job without a spec, as accounting or its first rank tells; oldest first."""
        return tuple(attempts_of(self.run, self.events, self.records))

    @property
    def tensorboard(self) -> Address | None:
        """Where it answers now."""
        return read_address(self.run.tensorboard_json)

    @property
    def restarts(self) -> int:
        """Of a job with a spec, failed or completed attempts that another one followed: what
        backoffLimit allows. Without one, Slurm's count."""
        if self.has_spec:
            return count_restarts(self.attempts)
        return (self.slurm.restart_count if self.slurm is not None else 0) or 0

    @property
    def preemptions(self) -> int:
        """Attempts that Slurm has preempted, as far as its supervisor, its ranks or accounting
        tell; what preemptionLimit is compared with."""
        if self.has_spec:
            return count_preemptions(self.attempts)
        known = {one.restart_count for one in self.conditions if one.type == "Preempted"}
        told = (one for one in self.plain_attempts if one.message[:9] == "preempted")
        return len(known | {one.restart_count for one in told})

    @property
    def known_preemptions(self) -> tuple[int | None, bool]:
        """The same without accounting: how many, None where nobody looks; and whether there may be
        more, which no rank could tell from a requeue by hand."""
        if self.has_spec:
            return count_preemptions(self.attempts), False
        first, restarts = self.first, self.restarts
        known = {} if first is None else dict(first.preempted)
        is_told = restarts == 0 or (first is not None and bool(first.saver))
        return (len(known) if is_told else None), restarts > len(known)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """The newest of the first rank's, oldest first; none where they cannot be read."""
        try:
            files = self.run.rank_event_files()
            found = read_events(files[min(files)], most_bytes=_MOST_BYTES) if files else ()
            # a named folder may have had other jobs
            own = None if self.has_spec or self.slurm is None else self.slurm.job_id
            return tuple(event for event in found if own in (None, event.job_id))
        except OSError:
            return ()

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """All of them, oldest first, with the pauses that its first rank has written down."""
        said = [*all_pauses(self.events), *read_conditions(self.run.conditions_jsonl)]
        if not self.has_spec:
            said += [*of_ranks(self.events), *of_slurm(self.slurm)]
        return in_order(said, self.slurm)

    @property
    def condition(self) -> Condition | None:
        """What it is now; None before anybody has said anything."""
        said = [*read_conditions(self.run.conditions_jsonl), *pause_now(self.first)]
        if not self.has_spec:
            said += [*of_slurm(self.slurm), *of_status(self.first)]
        return newest(in_order(said, self.slurm))

    @property
    def is_over(self) -> bool:
        """Whether nothing of it will run any more."""
        ended = self.slurm is not None and self.slurm.state.has_ended
        return ended or final_condition(self.conditions) is not None

    @property
    def saver(self) -> EventKind | None:
        """The event that says who saves at a stop; None while nobody does."""
        kinds = {event.kind for event in self.events}
        savers = (EventKind.ATTEMPT_BEGAN, EventKind.STOPS_TAKEN)
        return next((kind for kind in savers if kind in kinds), None)

    @property
    def committed(self) -> Event | None:
        """The newest checkpoint of its Run; None while there is none."""
        saves = (one for one in reversed(self.events) if one.kind is EventKind.SAVE_COMMITTED)
        return next(saves, None)

    @cached_property
    def rank_files(self) -> dict[int, str]:
        """The status file of each rank that has announced itself."""
        return self.run.rank_status_names()

    @cached_property
    def first(self) -> RankStatus | None:
        """The status of its first rank; None where that tells nothing of this job."""
        try:
            files = self.rank_files
            first = read_status(files[min(files)]) if files else None
        except OSError:
            return None
        own = None if self.has_spec or self.slurm is None else self.slurm.job_id
        return first if first is not None and own in (None, first.job_id) else None

    @cached_property
    def seen(self) -> RankViews:
        """Its ranks; one that wrote no end of an ended job was killed."""
        if self.slurm is None:
            found = (read_status(path) for path in self.run.rank_status_names().values())
            ranks = tuple(one for one in found if one is not None)
            return RankViews(ranks, ("",) * len(ranks))
        return _ranks_of(self.slurm)


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


def view_of(client: SlurmClient, which: str) -> JobView:
    """The job of an id or a run folder.

    Raises:
        NoSuchJob, SlurmMissing, ControllerUnreachable: as :func:`locate`.
        RunFolderError: it is no job of hydroslurm's, or its run folder cannot be read.
    """
    run, slurm = locate(client, which)
    view = JobView(run, slurm)
    try:
        if view.has_spec:
            view.spec  # noqa: B018 - one that cannot be read is no job with a spec
            return view
        require_ours(client, run, slurm, which)
    except PermissionError:
        raise RunFolderError(f"{run.root} is its owner's (0700): do this as that user") from None
    with contextlib.suppress(SlurmError):  # no accounting, or none yet
        view.records = client.history(slurm.id) if slurm is not None else ()
    return view


def my_jobs(client: SlurmClient, user: str) -> tuple[JobView, ...]:
    """All jobs of a user that hydroslurm has a part in, and whose folder can be read; one question
    to Slurm."""
    views = (JobView(run_dir_of(job), job) for job in client.jobs(user=user))
    return tuple(view for view in views if _is_listed(view))


def _is_listed(view: JobView) -> bool:
    try:
        if view.has_spec:
            view.attempts  # noqa: B018 - without them no line can be written
            return view.submission is not None
        return bool(view.submission is not None or view.rank_files or view.run.events.is_dir())
    except (RunFolderError, OSError):
        return False


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


def _is_ours(run: RunDir) -> bool:
    """Whether it has been submitted, or has ranks or, of an elastic run, a coordinator."""
    return run.submission_json.exists() or run.events.is_dir() or run.elastic.is_dir()


def _job_of_folder(client: SlurmClient, run: RunDir) -> Job | None:
    asked, owner = submission_of(run), read_owner(run)  # an owner: of a default folder
    named = str(owner.job_id) if owner is not None else None
    if asked is not None:
        named = asked.job_id
    try:
        return find_job(client, JobId.parse(named)) if named is not None else None
    except (SlurmError, UsageError):
        return None


def submission_of(run: RunDir) -> Submission | None:
    """What was asked for; None where hydroslurm did not submit it."""
    try:
        return submission.read(run.root)
    except RunFolderError:
        return None


def _ranks_of(job: Job) -> RankViews:
    ranks: list[RankStatus] = []
    silent: list[tuple[int, str]] = []
    names: list[str] = []
    problem = None
    folders = ranks_dirs_of(job)
    for folder in folders:
        files: Mapping[int, Path] = {}
        try:
            files = folder.rank_event_files()
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
    return RankViews(tuple(ranks), tuple(names), tuple(silent), problem)


def replica_states(view: JobView) -> dict[str, str]:
    """Replica -> its state in the latest attempt: ``running``, ``ended with status 137 (SIGKILL)``
    and the like, in the order of ranks."""
    if view.plan is None:
        return {}
    if not view.attempts:
        return dict.fromkeys(view.plan.replicas, "not started yet")
    attempt = view.attempts[-1]
    ends = TaskExits(view.run.srun_log(attempt.number))
    ends.look()
    if attempt.ending is not None:
        otherwise = f"ended with attempt {attempt.number} ({attempt.ending.value})"
    else:
        otherwise = _unended(view)
    return {name: _state(view.plan, name, ends.statuses, otherwise) for name in view.plan.replicas}


def _unended(view: JobView) -> str:
    """Of an attempt whose end nobody has written down."""
    state = None if view.slurm is None else view.slurm.state
    if state is None or state in (JobState.RUNNING, JobState.SUSPENDED):
        return "running" if state is not JobState.SUSPENDED else "suspended"
    return "ended with the job" if state.has_ended else "interrupted"


def _state(plan: Plan, name: str, statuses: Mapping[int, int], otherwise: str) -> str:
    own = [number for number, task in enumerate(plan.tasks) if task.replica == name]
    ended = [statuses[number] for number in own if number in statuses]
    if len(ended) < len(own):
        return otherwise
    return f"ended with status {format_status(max(ended))}"
