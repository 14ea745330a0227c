"""What a TrainingJob is on Slurm: nodes, tasks, and what each task runs.

A plan is made once, at the submission; the supervisor and each task read it from the run folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydroslurm.errors import UsageError
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.replicas import MASTER, ReplicaSpec, Template


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
        type: of the replica.
        node: index among the job's nodes, from 0.
        argv: the program and its arguments.
        env: variables in addition to the job's.
        working_directory: absolute.
        init: what runs before it.
        image: container image, or None.
        is_agent: whether ``argv`` is a torchrun agent instead of a rank.
    """

    replica: str
    type: str
    node: int
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    working_directory: str
    init: tuple[Step, ...] = ()
    image: str | None = None
    is_agent: bool = False


@dataclass(frozen=True)
class Plan:
    """A job as it is requested from Slurm.

    Attributes:
        nodes: how many.
        cpus_per_node, memory_mib_per_node, gpus_per_node: of each; None and 0: not requested.
        tasks: in the order of their ranks.
        policies: replica type -> restart policy.
        is_debug: whether the training is not started.
        runtime: what runs the tasks' images: pyxis, apptainer, or None.
    """

    nodes: int
    cpus_per_node: int
    memory_mib_per_node: int | None
    gpus_per_node: int
    tasks: tuple[TaskPlan, ...]
    policies: tuple[tuple[str, str], ...]
    is_debug: bool = False
    runtime: str | None = None

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

    def policy_of(self, replica: str) -> str:
        """Its restart policy."""
        kind = next(task.type for task in self.tasks if task.replica == replica)
        return dict(self.policies)[kind]

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def loads(cls, text: str) -> Plan:
        """Read :meth:`dumps` back.

        Raises:
            ValueError, KeyError, TypeError: not written by it.
        """
        value: dict[str, Any] = json.loads(text)
        tasks = tuple(_task(one) for one in value.pop("tasks"))
        policies = tuple((str(kind), str(policy)) for kind, policy in value.pop("policies"))
        return cls(**value, tasks=tasks, policies=policies)


def _task(value: dict[str, Any]) -> TaskPlan:
    value = dict(value)
    return TaskPlan(
        argv=tuple(value.pop("argv")),
        env=tuple((name, text) for name, text in value.pop("env")),
        init=tuple(Step(one["name"], tuple(one["argv"])) for one in value.pop("init")),
        **value,
    )


PYTHONS = ("python", "python3")
"""Commands that mean the Python that hydroslurm is installed in."""


def plan_job(job: TrainingJob, *, folder: Path, python: str, use_images: bool = True) -> Plan:
    """Lay a job out.

    Args:
        job: what is wanted.
        folder: absolute; the base of relative paths in the job.
        python: the interpreter that ``python`` means, absolute.
        use_images: False ignores images, for a cluster that cannot run any.

    Raises:
        UsageError: a command that torchrun cannot start.
    """
    specs = sorted(job.replica_specs, key=lambda spec: spec.type.lower() != MASTER)
    tasks: list[TaskPlan] = []
    demands: list[_Demand] = []
    for spec in specs:
        resources = spec.template.resources
        nodes = resources.nodes or spec.replicas
        share = spec.replicas // nodes
        for index in range(spec.replicas):
            node = len(demands) + index // share
            tasks += _tasks_of(job, spec, index, node, folder, python, use_images)
        memory = None if resources.memory_mib is None else share * resources.memory_mib
        demand = _Demand(share * resources.tasks * resources.cpus, memory, share * resources.gpus)
        demands += [demand] * nodes
    memories = [one.memory_mib for one in demands if one.memory_mib is not None]
    return Plan(
        nodes=len(demands),
        cpus_per_node=_cpus(tasks, demands),
        memory_mib_per_node=max(memories, default=None),
        gpus_per_node=max(one.gpus for one in demands),
        tasks=tuple(tasks),
        policies=tuple((spec.type, spec.restart_policy) for spec in specs),
        is_debug=job.run_mode.debug.enable,
    )


@dataclass(frozen=True)
class _Demand:
    """Of one node."""

    cpus: int
    memory_mib: int | None
    gpus: int


def _cpus(tasks: Sequence[TaskPlan], demands: Sequence[_Demand]) -> int:
    """CPUs of each node, given that every task gets the same number."""
    counts = [0] * len(demands)
    for task in tasks:
        counts[task.node] += 1
    each = max(math.ceil(one.cpus / n) for one, n in zip(demands, counts, strict=True))
    return each * max(counts)


def _tasks_of(
    job: TrainingJob,
    spec: ReplicaSpec,
    index: int,
    node: int,
    folder: Path,
    python: str,
    use_images: bool,
) -> list[TaskPlan]:
    template = spec.template
    debug = next(
        (one for one in job.run_mode.debug.replica_specs if one.type.lower() == spec.type.lower()),
        None,
    )
    image = template.image if use_images else None
    interpreter = "python" if image else python
    is_agent = job.torchrun_config.enable and not job.run_mode.debug.enable
    if job.run_mode.debug.enable:
        argv: tuple[str, ...] = debug.command if debug else ("sleep", "infinity")
    elif is_agent:
        argv = agent_command(job, template, interpreter)
    else:
        argv = _resolved((*template.command, *template.args), interpreter)
    skip_init = job.run_mode.debug.enable and debug is not None and debug.skip_init
    init = () if skip_init else _init(template, interpreter)
    task = TaskPlan(
        replica=f"{spec.type}-{index}",
        type=spec.type,
        node=node,
        argv=argv,
        env=tuple((one.name, one.value) for one in template.env),
        working_directory=str(folder / (template.working_directory or "")),
        init=init,
        image=image,
        is_agent=is_agent,
    )
    return [task] * template.resources.tasks


def _init(template: Template, interpreter: str) -> tuple[Step, ...]:
    return tuple(
        Step(one.name, _resolved((*one.command, *one.args), interpreter)) for one in template.init
    )


def _resolved(argv: tuple[str, ...], interpreter: str) -> tuple[str, ...]:
    return (interpreter, *argv[1:]) if argv[0] in PYTHONS else argv


def agent_command(job: TrainingJob, template: Template, python: str) -> tuple[str, ...]:
    """Turn ``python train.py ...`` into ``hydroslurm agent -- ... train.py ...``, which starts the
    ranks as torchrun does and forwards Slurm's signals to them.

    ``-m module`` stays; ``-u`` is dropped, torchrun does that anyway. With any other option of
    Python, and for any other program, the agent starts the command as it is.

    Raises:
        UsageError: a Python without a script.
    """
    config = job.torchrun_config
    least = config.min_nodes or job.replicas
    procs = template.resources.gpus if config.proc_per_node == "gpu" else config.proc_per_node
    nodes = f"{least}:{job.replicas}" if least < job.replicas else str(job.replicas)
    meeting = [f"--nnodes={nodes}", f"--rdzv-backend={config.rdzv_backend}"]
    options = [
        # a single agent picks a free port, not torch's default one
        *(["--standalone"] if job.replicas == 1 else meeting),
        f"--nproc-per-node={procs}",
        f"--max-restarts={config.max_restarts}",
        *config.extra_options,
    ]
    argv = (*template.command, *template.args)
    start = (python, "-m", "hydroslurm.cli", "agent", "--", *options)
    if argv[0] not in PYTHONS:
        return (*start, "--no-python", *argv)
    rest = argv[1:]
    while rest and rest[0] == "-u":
        rest = rest[1:]
    if not rest:
        raise UsageError(
            f"command: {' '.join(argv)!r} names no script; put it in args, as in args: [train.py]"
        )
    if rest[0].startswith("-") and rest[0] != "-m":
        return (*start, "--no-python", python, *rest)
    return (*start, *rest)
