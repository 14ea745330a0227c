"""The batch scripts of a TrainingJob: its supervisor's, its janitor's, and that of an elastic job's
members. Pure: values in, text out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydroslurm.core import rundir
from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import ELASTIC_ENV, RUN_DIR_ENV, RunDir
from hydroslurm.jobs.images import Runtime
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.sections import Elastic
from hydroslurm.jobs.supervisor import CLEAN
from hydroslurm.runtime.autoload import PREEMPT_ENV

WARNING_SIGNAL = "URG"
"""Before the time limit. Slurm accepts it, and a process without a handler ignores it."""
SUPERVISOR_STARTS = 10
"""How often the batch script starts the supervisor, if it is killed each time."""
COORDINATOR_WARNING_S = 60
"""Before its time limit the coordinator has itself requeued; the members train on meanwhile."""
JANITOR_MIN = 10


def job_script(job: TrainingJob, plan: Plan, run: RunDir) -> str:
    """The batch script that runs the supervisor, again and again while it is killed."""
    supervisor = python_line("hydroslurm.jobs.supervisor.main", str(run.root))
    if job.elastic is None:
        options = what_it_needs(job, plan)
        if job.preemption.mode == "pause":  # nobody would save
            del options["signal"]
        traps, start = _OUTLIVE_THE_RANKS, [f"    {supervisor}", "    status=$?"]
    else:
        one_cpu = {"nodes": 1, "ntasks-per-node": 1, "cpus-per-task": 1}
        warning = f"B:{WARNING_SIGNAL}@{COORDINATOR_WARNING_S}"
        options = {**where_of(job), **base_of(job.elastic), **one_cpu, "signal": warning}
        traps, start = _PASS_ON, [f"    {supervisor} &", *_WAIT_THROUGH_SIGNALS]
    options |= {
        "job-name": in_option_line(job.name),
        "comment": rundir.comment_for(run),
        "requeue": True,
        "output": log_of_shell(run),
        "open-mode": "append",
    }
    lines = [
        *traps,
        f"for start in {' '.join(str(n + 1) for n in range(SUPERVISOR_STARTS))}; do",
        *start,
        "    # killed by a signal other than SIGTERM: start it again, it goes on where it was",
        '    [ "$status" -gt 128 ] && [ "$status" -ne 143 ] || break',
        "done",
        last_line(),
    ]
    return script_of(options, lines)


_OUTLIVE_THE_RANKS: tuple[str, ...] = (
    "# the ranks get these signals, too; this shell must outlive them",
    "trap : TERM URG USR1 USR2",
)
_PASS_ON = (
    "# Slurm signals this shell alone where it tracks processes by cgroups",
    """trap 'kill -TERM "$coordinator" 2>/dev/null' TERM""",
    """trap 'kill -URG "$coordinator" 2>/dev/null' URG""",
    "trap : USR1 USR2",
)
_WAIT_THROUGH_SIGNALS = (
    "    coordinator=$!",
    "    while :; do",
    '        wait "$coordinator"',
    "        status=$?",
    "        # above 128: a signal interrupted `wait`, or ended the coordinator",
    '        [ "$status" -gt 128 ] && kill -0 "$coordinator" 2>/dev/null || break',
    "    done",
)


def member_script(job: TrainingJob, plan: Plan, run: RunDir, where: dict[str, Any]) -> str:
    """The batch script of one element. It is not requeued: the coordinator submits another one,
    which need not wait."""
    # all other jobs are submitted sooner without these
    from hydroslurm.jobs.supervisor.bad_nodes import node_command
    from hydroslurm.jobs.supervisor.job_step import container_options

    options = {
        **what_it_needs(job, plan),
        **where,
        "job-name": run.root.name,
        "comment": rundir.comment_for_members(run),
        "no-requeue": True,
        "output": f"{run.logs}/member-%A_%a.log",
        "open-mode": "append",
    }
    variables = dict(plan.rank_env)
    if not job.has_agent:  # a rank that is a member pauses for nobody: the others would wait for it
        variables.pop(PREEMPT_ENV, None)
    member = '"$SLURM_ARRAY_JOB_ID"_"$SLURM_ARRAY_TASK_ID"'
    root = shlex.quote(str(run.root))
    python = "python3" if plan.runtime == Runtime.PYXIS else sys.executable
    task = module_command(python, "hydroslurm.jobs.task", str(run.plan_json))
    check = []
    if plan.preflight is not None:
        words = node_command(plan.preflight, run, plan.tasks[0].working_directory)
        failed = 'echo "hydroslurm: preflight failed with status $?"; exit 1'
        check = [f"srun --nodes=1 --ntasks=1 {shlex.join(words)} || {{ {failed}; }}"]
    lines = [
        *_OUTLIVE_THE_RANKS,
        *(f"export {name}={shlex.quote(text)}" for name, text in variables.items()),
        f"export {ELASTIC_ENV}={root}",
        "export HYDROSLURM_ALONE=1 MASTER_ADDR=127.0.0.1  # its ranks meet on the node, alone",
        f"export {RUN_DIR_ENV}={root}/elastic/members/{member}",
        *check,
        f"srun --nodes=1 --ntasks={len(plan.tasks)} --cpus-per-task={plan.cpus_per_task} \\",
        "    --kill-on-bad-exit=0 --wait=0 --export=ALL --unbuffered --open-mode=append \\",
        f"    --output={shlex.quote(str(run.logs))}/member-{member}-%t.log \\",
        f"    {shlex.join([*container_options(plan, run.root), *task])}",
    ]
    return script_of(options, lines)


def what_it_needs(job: TrainingJob, plan: Plan) -> dict[str, Any]:
    """The options of a job that runs the tasks of a plan: where, what for, how long."""
    return {
        **where_of(job),
        **job.scheduler.options,
        "time": job.scheduler.time_limit_minutes,
        "nodes": plan.nodes,
        "ntasks-per-node": max(plan.tasks_per_node),
        "cpus-per-task": plan.cpus_per_task,
        "mem": None if plan.memory_mib_per_node is None else f"{plan.memory_mib_per_node}M",
        "gpus-per-node": plan.gpus_per_node or None,
        "signal": f"{WARNING_SIGNAL}@{job.preemption.warning_seconds}",
    }


def janitor_script(job: TrainingJob, run: RunDir, job_id: int) -> str:
    """The batch script of the job that cleans up after ``job_id``. It has none of the spec's own
    options: it would be held, start late, or ask for what the job needs."""
    options = {
        **where_of(job),
        **(base_of(job.elastic) if job.elastic is not None else {}),
        "job-name": in_option_line(f"{job.name[:180]}-janitor"),
        "time": JANITOR_MIN,
        "dependency": f"afterany:{job_id}",
        "nodes": 1,
        "output": log_of_shell(run),
        "open-mode": "append",
    }
    command = python_line("hydroslurm.jobs.supervisor.main", CLEAN, str(run.root))
    return script_of(options, [command])


def log_of_shell(run: RunDir) -> str:
    """The log of the batch script, named like those that submitit writes for a script's ranks."""
    return f"{run.logs}/%j_0_log.out"


def base_of(elastic: Elastic) -> dict[str, Any]:
    """Where the first members of an elastic job run, and what has to outlive the others."""
    base = {"partition": elastic.base.partition, "qos": elastic.base.qos}
    return {name: value for name, value in base.items() if value is not None}


def where_of(job: TrainingJob) -> dict[str, Any]:
    """Where a job runs in Slurm."""
    where = job.scheduler
    return {
        "partition": where.partition,
        "qos": where.qos,
        "account": where.account,
        "reservation": where.reservation,
        "nice": where.nice or None,
    }


def in_option_line(text: str) -> str:
    """Escape a text that submitit puts into an ``#SBATCH`` line: submitit quotes for a shell, but
    sbatch takes a backslash for an escape even between single quotes. Seen on Slurm 22.05.8."""
    return text.replace("\\", "\\\\")


def last_line() -> str:
    """The end of a batch script of ours, after ranks whose status is in ``$status``."""
    command = module_command(sys.executable, "hydroslurm.cli", "batch", "--ended")
    return f'exec {shlex.join(command)} "$status"'


def python_line(module: str, *arguments: str) -> str:
    """A line of a shell that runs a module of ours with this Python."""
    return shlex.join(module_command(sys.executable, module, *arguments, unbuffered=True))


def script_of(options: Mapping[str, Any], lines: Sequence[str]) -> str:
    """A whole batch script.

    Args:
        options: by sbatch's long names; None leaves one out, True is one without a value.
    """
    given = [
        f"#SBATCH --{name.replace('_', '-')}"
        + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in options.items()
        if value is not None
    ]
    return "\n".join(["#!/bin/bash", *given, "", *lines, ""])
