"""What is submitted: a TrainingJob's plan (nodes, tasks, and what each task runs), and for any job
what sbatch was asked for.

A plan is made once, at the submission (:mod:`hydroslurm.jobs.layout`); the supervisor and each task
read it from the run folder. They start with the job and are in its way until the ranks run, so this
module imports neither pydantic nor the spec.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from hydroslurm.core.decoding import decode
from hydroslurm.core.files import parse_json, read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import LaunchError, RunFolderError

_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Step:
    """A command that has to finish before the task's own starts."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True)
class TaskPlan:
    """What one task of the job step runs.

    Attributes:
        replica: such as ``worker-2``.
        node: index among the job's nodes, from 0.
        argv: the program and its arguments.
        env: variables in addition to the job's.
        working_directory: absolute.
        init: what runs before it.
        image: container image, or None.
        is_agent: whether ``argv`` is a torchrun agent instead of a rank.
        restart_policy: of the replica.
    """

    replica: str
    node: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    working_directory: str
    init: tuple[Step, ...] = ()
    image: str | None = None
    is_agent: bool = False
    restart_policy: str = "OnFailure"


@dataclass(frozen=True)
class RunLimits:
    """When the supervisor gives the job up, and what it cleans up then: the spec's runPolicy, under
    the same names."""

    backoff_limit: int = 3
    preemption_limit: int | None = None
    active_deadline_seconds: int | None = None
    clean_policy: str = "Unfinished"
    max_excluded_nodes: int = 2


@dataclass(frozen=True)
class TensorBoardPlan:
    """The spec's tensorboard, its folder absolute."""

    log_directory: str
    port: int
    host: str


@dataclass(frozen=True)
class ElasticPlan:
    """Of a job whose members come and go; its tasks are those of one member.

    Attributes:
        base: how many members belong into the base array; 0: there is none.
        exclude_after: a node on which so many members have failed gets no more.
    """

    base: int
    exclude_after: int


@dataclass(frozen=True)
class Plan:
    """A job as it is requested from Slurm.

    Attributes:
        nodes: how many.
        cpus_per_node, memory_mib_per_node, gpus_per_node: of each; None and 0: not requested.
        tasks: in the order of their ranks.
        rank_env: variables of every task that the spec's preemption asks for.
        limits: when to give the job up.
        warning_s: how long before the time limit the ranks are told to save.
        tensorboard: what is to run beside the ranks, or None.
        preflight: what has to succeed on each node before the ranks start; None: no check.
        notify: who is told what becomes of the job: a command, or the URL of a webhook; or empty.
        is_debug: whether the training is not started.
        runtime: what runs the tasks' images: pyxis, apptainer, or None.
        elastic: None for a job of a fixed size.
    """

    nodes: int
    cpus_per_node: int
    memory_mib_per_node: int | None
    gpus_per_node: int
    tasks: tuple[TaskPlan, ...]
    rank_env: tuple[tuple[str, str], ...] = ()
    limits: RunLimits = RunLimits()
    warning_s: int = 120
    tensorboard: TensorBoardPlan | None = None
    preflight: tuple[str, ...] | None = None
    notify: tuple[str, ...] = ()
    is_debug: bool = False
    runtime: str | None = None
    elastic: ElasticPlan | None = None

    @property
    def replicas(self) -> tuple[str, ...]:
        """Names in the order of their ranks; the first is the master."""
        return tuple(dict.fromkeys(task.replica for task in self.tasks))

    @property
    def tasks_per_node(self) -> tuple[int, ...]:
        counts = [0] * self.nodes
        for task in self.tasks:
            counts[task.node] += 1
        return tuple(counts)

    @property
    def is_even(self) -> bool:
        """Whether all nodes have the same number of tasks."""
        return len(set(self.tasks_per_node)) == 1

    @property
    def cpus_per_task(self) -> int:
        """What srun gives each task on the fullest node."""
        return max(1, self.cpus_per_node // max(self.tasks_per_node))

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read_plan(path: Path) -> Plan:
    """The plan that was made at the submission.

    Raises:
        LaunchError: there is none, or none of this version.
    """
    try:
        text = read_regular(path, limit_bytes=_MOST_BYTES)
        return msgspec.convert(parse_json(text, printable=False), Plan)
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"{path} is no plan of this version ({error!r}); submit the job again"
        ) from error


# --- submission.json: the intent before sbatch, the job id after it. A crash between the two can be
# found later: an intent without an id may have become a job, which its name identifies

_MOST_COMMAND_BYTES = 16 << 20
"""A command may be long."""


@dataclass(frozen=True)
class Submission:
    """What Slurm was asked for.

    Attributes:
        name: the job's name.
        command: what each rank runs, to be shown.
        job_id: Slurm's, as submitit writes it (``12`` or ``12_3``); None before sbatch answered.
        replicas, backoff_limit: of a job with a spec, for whoever lists many jobs; None without.
    """

    name: str
    command: str
    job_id: str | None = None
    replicas: int | None = None
    backoff_limit: int | None = None


def write_submission(run: RunDir, submission: Submission, *, durable: bool = True) -> None:
    """Replace submission.json.

    Args:
        durable: False where the caller syncs it with others, before it calls sbatch.

    Raises:
        RunFolderError: the folder cannot be written.
    """
    try:
        text = json.dumps(asdict(submission), indent=2) + "\n"
        write_atomically(run.submission_json, text, mode=0o666, durable=durable)
    except OSError as error:
        raise RunFolderError(f"cannot write {run.submission_json}: {error.strerror}") from error


def read_submission(root: Path) -> Submission:
    """Read submission.json back.

    Raises:
        RunFolderError: not there, or not one of ours.
    """
    path = RunDir(root).submission_json
    try:
        return decode(Submission, read_regular(path, limit_bytes=_MOST_COMMAND_BYTES))
    except OSError as error:
        raise RunFolderError(
            f"{root} is not a run folder: no {path.name} in it ({error.strerror})"
        ) from error
    except ValueError as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from error
