"""The batch scripts of a TrainingJob: its supervisor's, and its janitor's. Pure: values in, text
out."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hydroslurm.core import rundir
from hydroslurm.core.proc import module_command
from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.launch.batch import in_option_line, last_line
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.job import TrainingJob
from hydroslurm.jobs.spec.sections import Elastic
from hydroslurm.jobs.supervisor import CLEAN

WARNING_SIGNAL = "URG"
"""Before the time limit. Slurm accepts it, and a process without a handler ignores it."""
SUPERVISOR_STARTS = 10
"""How often the batch script starts the supervisor, if it is killed each time."""
JANITOR_MIN = 10


def job_script(job: TrainingJob, plan: Plan, run: RunDir) -> str:
    """The batch script that runs the supervisor, again and again while it is killed."""
    options = {
        **what_it_needs(job, plan),
        "job-name": in_option_line(job.name),
        "comment": rundir.comment_for(run),
        "requeue": True,
        "output": log_of_shell(run),
        "open-mode": "append",
    }
    if job.preemption.mode == "pause":  # nobody would save
        del options["signal"]
    lines = [
        "# the ranks get these signals, too; this shell must outlive them",
        "trap : TERM URG USR1 USR2",
        f"for start in {' '.join(str(n + 1) for n in range(SUPERVISOR_STARTS))}; do",
        f"    {python_line('hydroslurm.jobs.supervisor.main', str(run.root))}",
        "    status=$?",
        "    # killed by a signal other than SIGTERM: start it again, it goes on where it was",
        '    [ "$status" -gt 128 ] && [ "$status" -ne 143 ] || break',
        "done",
        last_line(),
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
    elastic = job.elastic
    module = "supervisor" if elastic is None else "elastic"
    options = {
        **where_of(job),
        **(base_of(elastic) if elastic is not None else {}),
        "job-name": in_option_line(f"{job.name[:180]}-janitor"),
        "time": JANITOR_MIN,
        "dependency": f"afterany:{job_id}",
        "nodes": 1,
        "output": log_of_shell(run),
        "open-mode": "append",
    }
    command = python_line(f"hydroslurm.jobs.{module}.main", CLEAN, str(run.root))
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
