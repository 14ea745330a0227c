"""From a TrainingJob to its plan: which task runs where, and what the supervisor has to know.
Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import ATTEMPTS_ENV, SAVE_EVERY_ENV, SUPERVISED_ENV
from hydroslurm.errors import UsageError
from hydroslurm.jobs.plan import Plan, RunLimits, Step, TaskPlan, TensorBoardPlan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.replicas import MASTER, ReplicaSpec, Template
from hydroslurm.runtime.autoload import PREEMPT_ENV
from hydroslurm.vacate.policy import VACATE_ENV

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
        rank_env=tuple(rank_variables(job).items()),
        limits=RunLimits(**dict(job.run_policy)),
        warning_s=job.preemption.warning_seconds,
        tensorboard=_tensorboard(job, folder),
        preflight=job.preflight and _resolved(job.preflight, python),
        notify=job.notify,
        is_debug=job.run_mode.debug.enable,
    )


def rank_variables(job: TrainingJob) -> dict[str, str]:
    """The spec's ``preemption`` as environment variables for the ranks."""
    wanted = job.preemption
    made = {PREEMPT_ENV: "requeue" if wanted.mode == "requeue" else "pause", SUPERVISED_ENV: "1"}
    made[VACATE_ENV] = wanted.vacate
    if wanted.save_every_seconds is not None:
        made[SAVE_EVERY_ENV] = str(wanted.save_every_seconds)
    if wanted.attempts_without_progress is not None:
        made[ATTEMPTS_ENV] = str(wanted.attempts_without_progress)
    return made


def _tensorboard(job: TrainingJob, folder: Path) -> TensorBoardPlan | None:
    board = job.tensorboard
    if board is None:
        return None
    return TensorBoardPlan(str(folder / board.log_directory), board.port, board.host)


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
    is_agent = job.has_agent and not job.run_mode.debug.enable
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
        node=node,
        argv=argv,
        env=tuple((one.name, one.value) for one in template.env),
        working_directory=str(folder / (template.working_directory or "")),
        init=init,
        image=image,
        is_agent=is_agent,
        restart_policy=spec.restart_policy,
    )
    return [task] * (1 if is_agent else template.resources.tasks)


def _init(template: Template, interpreter: str) -> tuple[Step, ...]:
    return tuple(
        Step(one.name, _resolved((*one.command, *one.args), interpreter)) for one in template.init
    )


def _resolved(argv: tuple[str, ...], interpreter: str) -> tuple[str, ...]:
    return (interpreter, *argv[1:]) if argv[0] in PYTHONS else argv


def ranks_of_agent(job: TrainingJob, template: Template) -> int:
    """How many ranks an agent starts; without torchrunConfig as many as srun would."""
    config = job.torchrun_config
    if not config.enable:
        return template.resources.tasks
    return template.resources.gpus if config.proc_per_node == "gpu" else int(config.proc_per_node)


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
    procs = ranks_of_agent(job, template)
    nodes = f"{least}:{job.replicas}" if least < job.replicas else str(job.replicas)
    meeting = [f"--nnodes={nodes}", "--rdzv-backend=c10d"]
    if job.elastic is not None:  # the coordinator says who meets
        meeting = []
    elif job.replicas == 1:  # a single agent picks a free port, not torch's default one
        meeting = ["--standalone"]
    options = [
        *meeting,
        f"--nproc-per-node={procs}",
        f"--max-restarts={config.max_restarts}",
        *config.extra_options,
    ]
    argv = (*template.command, *template.args)
    # behind `--` torchrun leaves alone what is the script's: it would take `--log` for one of its
    # own that is ambiguous
    start = (*module_command(python, "hydroslurm.cli", "agent", "--"), *options)
    if argv[0] not in PYTHONS:
        return (*start, "--no-python", "--", *argv)
    rest = argv[1:]
    while rest and rest[0] == "-u":
        rest = rest[1:]
    if not rest:
        raise UsageError(
            f"command: {' '.join(argv)!r} names no script; put it in args, as in args: [train.py]"
        )
    if rest[0].startswith("-") and rest[0] != "-m":
        return (*start, "--no-python", "--", python, *rest)
    if rest[0] == "-m":
        return (*start, "-m", "--", *rest[1:])
    return (*start, "--", *rest)
