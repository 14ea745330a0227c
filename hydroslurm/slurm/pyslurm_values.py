"""What pyslurm's objects say -> frozen values. Pure: pyslurm itself is not imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydroslurm.slurm import text
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.values import Job, Partition

CONFIG_NAMES: Mapping[str, str] = {
    "AccountingStorageType": "accounting_storage_type",
    "AuthInfo": "auth_info",
    "ClusterName": "cluster_name",
    "JobFileAppend": "job_file_append",
    "JobRequeue": "job_requeue",
    "KillWait": "kill_wait_time",
    "MessageTimeout": "message_timeout",
    "OverTimeLimit": "over_time_limit",
    "MpiDefault": "mpi_default",
    "PreemptMode": "preempt_mode",
    "PreemptParameters": "preempt_parameters",
    "PreemptType": "preempt_type",
    "ProctrackType": "proctrack_type",
    "RequeueExit": "requeue_exit",
    "SLURM_VERSION": "version",
    "SchedulerParameters": "scheduler_parameters",
    "SlurmctldParameters": "slurmctld_parameters",
}
"""Slurm's name -> pyslurm's, for what ``config()`` tells with this backend."""


def job_of_pyslurm(job: Any) -> Job:
    """``pyslurm.Job`` -> Job."""
    state, flags = text.parse_state(job.state)
    array_id = _number(job.array_id)
    return Job(
        job_id=job.id,
        state=state,
        flags=flags,
        name=job.name or "",
        user=job.user_name or "",
        partition=job.partition or "",
        reason=(job.state_reason or "").replace(" ", "_"),
        nodes=text.expand_nodes(job.allocated_nodes or ""),
        n_nodes=_number(job.num_nodes),
        n_tasks=_number(job.ntasks),
        n_cpus=_number(job.cpus),
        submit_epoch_s=_number(job.submit_time),
        eligible_epoch_s=_number(job.eligible_time),
        start_epoch_s=_number(job.start_time),
        end_epoch_s=_number(job.end_time),
        time_limit_s=_minutes_s(job.time_limit),
        restart_count=job.requeue_count or 0,
        preempt_epoch_s=_number(job.preempt_time),
        suspend_epoch_s=_number(job.suspend_time),
        pre_suspend_s=job.pre_suspension_time or 0,
        work_dir=job.working_directory or "",
        std_out=job.standard_output or "",
        std_err=job.standard_error or job.standard_output or "",
        comment=job.comment or "",
        exit_code=job.exit_code,
        exit_signal=job.exit_code_signal,
        array_job_id=array_id,
        # 0 is a task's number, and is also what pyslurm makes None of: "not in an array" is told by
        # array_id
        array_task_id=(_number(job.array_task_id) or _first_task(job)) if array_id else None,
        is_batch=job.is_batch_job,
        may_requeue=job.is_requeueable,
        memory_per_node_bytes=_megabytes(job.memory_per_node),
        memory_per_cpu_bytes=_megabytes(job.memory_per_cpu),
        qos=getattr(job, "qos", None) or "",
        gres=text.join_gres(_gres_of_pyslurm(job)),
    )


def partition_of_pyslurm(partition: Any) -> Partition:
    """``pyslurm.Partition`` -> Partition."""
    return Partition(
        name=partition.name,
        state=partition.state,
        priority_tier=_number(partition.priority_tier) or 0,
        preempt_mode=partition.preempt_mode or "OFF",
        grace_time_s=_number(partition.preemption_grace_time) or 0,
        nodes=text.expand_nodes(partition.nodes or ""),
        max_time_s=_minutes_s(partition.max_time),
        is_default=bool(partition.is_default),
    )


def config_of_pyslurm(config: Any) -> Config:
    """``pyslurm.slurmctld.Config`` -> Config, in the words of ``scontrol show config``."""
    entries = {name: _as_text(getattr(config, field)) for name, field in CONFIG_NAMES.items()}
    cgroup = getattr(config, "cgroup_config", None)
    children = getattr(cgroup, "signal_children_processes", None)
    if children is not None:
        entries["SignalChildrenProcesses"] = "yes" if children else "no"
    return Config(entries)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Mapping):
        return ",".join(key if v is True else f"{key}={v}" for key, v in value.items())
    if isinstance(value, list | tuple):
        return ",".join(str(each) for each in value)
    return str(value)


def _number(value: Any) -> int | None:
    """None for nothing and for pyslurm's "UNLIMITED"."""
    return value if isinstance(value, int) else None


def _minutes_s(value: Any) -> int | None:
    minutes = _number(value)
    return None if minutes is None else minutes * 60


def _megabytes(value: Any) -> int | None:
    number = _number(value)
    return number * 2**20 if number else None


def _gres_of_pyslurm(job: Any) -> list[str]:
    """``{"gpu:tesla": 2}`` as Slurm's text. Only ``--gres`` is told; the name is deprecated."""
    per_node = getattr(job, "gres_per_node", None) or {}
    return [f"gres:{name}:{count}" for name, count in per_node.items()]


def _first_task(job: Any) -> int | None:
    """Task 0, which pyslurm does not tell from "no number"; None for tasks not started."""
    return None if job.array_tasks_waiting else 0
