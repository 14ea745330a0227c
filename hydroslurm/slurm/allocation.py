"""From SLURM_* variables to a frozen Allocation. Pure: the environment is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hydroslurm.errors import UnreadableOutput, UsageError

ALONE_ENV = "HYDROSLURM_ALONE"
"""Environment variable: 1 says that the tasks of a job step do not train together."""


def is_alone(environ: Mapping[str, str]) -> bool:
    """Whether this process trains without the other tasks of its job step."""
    return environ.get(ALONE_ENV, "").strip().lower() in ("1", "true", "yes", "on")


_LAST_STEP = 0xFFFFFFF0
"""SLURM_MAX_NORMAL_STEP_ID of slurm.h."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What a process inside a Slurm job knows about itself from its environment.

    A process started by srun is a rank of a job step. Any other (the batch script, a Python that it
    starts without srun) has ``step_id`` None, rank 0 and a world size of 1: sbatch sets
    SLURM_NTASKS and SLURM_PROCID for the batch shell, too, where they say nothing about processes.

    Attributes:
        job_id: SLURM_JOB_ID, by which ``SlurmClient.job`` finds this very element of an array. It
            must not name a job to change: to Slurm it may mean all elements.
        rank: among all tasks of the job step (SLURM_PROCID). local_rank: among the tasks of the job
            step on this node (SLURM_LOCALID). world_size: tasks of the job step
            (SLURM_STEP_NUM_TASKS, else SLURM_NTASKS). node_rank: index of this node in ``nodes``
            (SLURM_NODEID). nodes: of the job step where there is one, else of the job.
            restart_count: how often the job had been requeued when this process started.
    """

    job_id: int
    step_id: int | None = None
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    node_rank: int = 0
    nodes: tuple[str, ...] = ()
    restart_count: int = 0
    submit_dir: str = ""
    cluster_name: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Allocation | None:
        """Read the variables; None outside of a job.

        Raises:
            UsageError: a variable has a value that Slurm never gives it; the message names it.
        """
        job_id = _number(environ, "SLURM_JOB_ID", least=1)
        if job_id is None:
            return None
        step_id = step_of(environ)
        rank, world_size = 0, 1
        if step_id is not None:
            rank = _number(environ, "SLURM_PROCID") or 0
            world_size = _world_size(environ, rank)
        return cls(
            job_id=job_id,
            step_id=step_id,
            rank=rank,
            local_rank=(_number(environ, "SLURM_LOCALID") or 0) if step_id is not None else 0,
            world_size=world_size,
            node_rank=_number(environ, "SLURM_NODEID") or 0,
            nodes=_nodes(environ, in_step=step_id is not None),
            restart_count=_number(environ, "SLURM_RESTART_COUNT") or 0,
            submit_dir=environ.get("SLURM_SUBMIT_DIR", ""),
            cluster_name=environ.get("SLURM_CLUSTER_NAME", ""),
        )


def step_of(environ: Mapping[str, str]) -> int | None:
    """The number of srun's job step that this process is a task of; None for any other process.

    Slurm numbers what is no step of srun's from the top: since 26.05 a batch script has
    SLURM_STEP_ID=-5 and the shell of salloc -6 (SLURM_BATCH_SCRIPT and SLURM_INTERACTIVE_STEP of
    slurm.h). docs/partitions.md has all variables that are read, with their values by release.

    Raises:
        UsageError: SLURM_STEP_ID is no number.
    """
    value = environ.get("SLURM_STEP_ID", "").strip()
    if value.startswith("-") and value[1:].isascii() and value[1:].isdecimal():
        return None
    number = _number(environ, "SLURM_STEP_ID")
    return None if number is None or number > _LAST_STEP else number


def _number(environ: Mapping[str, str], name: str, *, least: int = 0) -> int | None:
    value = environ.get(name, "").strip()
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and int(value) >= least):
        raise UsageError(
            f"{name}={value!r} is not a number of {least} or more, as Slurm sets it. "
            "Unset it to run outside of a job"
        )
    return int(value)


def _world_size(environ: Mapping[str, str], rank: int) -> int:
    name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = _number(environ, name, least=1) or 1
    if rank >= size:
        raise UsageError(
            f"SLURM_PROCID={rank} and {name}={size} contradict each other: ranks go from 0 to "
            f"{size - 1}. Was one of them set by hand?"
        )
    return size


def _nodes(environ: Mapping[str, str], *, in_step: bool) -> tuple[str, ...]:
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    for name in names if in_step else names[1:]:
        if environ.get(name):
            from hydroslurm.slurm.text import expand_nodes  # outside of a job nothing needs it

            try:
                return expand_nodes(environ[name])
            except UnreadableOutput as error:
                raise UsageError(f"{name} is not a node list: {error}") from error
    return ()
