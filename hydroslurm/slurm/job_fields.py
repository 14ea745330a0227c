"""One table: under which name each of Slurm's four sources gives what a ``Job`` holds. Pure.

What one source spells in a form of its own (state, exit status, array numbers, output files, GRES)
is read beside the table, in that source's module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hydroslurm.slurm import text
from hydroslurm.slurm.values import Job

Source = Literal["json", "scontrol", "sacct", "pyslurm"]
Read = Callable[[Any], Any]


@dataclass(frozen=True, kw_only=True)
class JobField:
    """Where one attribute of ``Job`` comes from; a source without a name does not give it.

    Attributes:
        read: turns the value of any source into ours; never called with None.
        sacct_read: for a column of sacct's that has another unit than scontrol's.
        required: a record of squeue's or scontrol's without it is unreadable.
    """

    read: Read
    json: str = ""
    scontrol: str = ""
    sacct: str = ""
    pyslurm: str = ""
    sacct_read: Read | None = None
    required: bool = False


def job_of_fields(source: Source, get: Callable[[str, bool], Any], **special: Any) -> Job:
    """Read one record through the table.

    Args:
        get: name and whether it is required -> the source's value, None for none.
        special: the attributes that the source's module has read itself.

    Raises:
        KeyError, ValueError, TypeError, AttributeError: a field is missing or malformed; callers
            wrap this in ``text.read_record``.
    """
    values: dict[str, Any] = {}
    for attribute, field in JOB_FIELDS.items():
        name = getattr(field, source)
        if not name:
            continue
        given = get(name, field.required)
        read = field.sacct_read if source == "sacct" and field.sacct_read else field.read
        value = None if given is None else read(given)
        if value is not None:  # otherwise Job's own default, "not given"
            values[attribute] = value
    return Job(**values | special)


def number(value: Any) -> int | None:
    """``5``, ``"5"`` or ``{"set": true, "infinite": false, "number": 5}``; None for no limit."""
    if isinstance(value, Mapping):
        value = value["number"] if value.get("set") and not value.get("infinite") else None
    if value == "UNLIMITED":  # pyslurm's word
        return None
    return None if value is None else int(value)


def minutes_s(value: Any) -> int | None:
    """Seconds of a number of minutes; None for none and for words such as Partition_Limit."""
    if isinstance(value, str) and not value.isdecimal():
        return None
    minutes = number(value)
    return minutes * 60 if minutes else None


def _count(value: Any) -> int | None:
    return text.leading_int(value) if isinstance(value, str) else number(value)


def _moment(value: Any) -> int | None:
    return text.parse_moment(value) if isinstance(value, str) else number(value) or None


def _limit_s(value: Any) -> int | None:
    return text.parse_duration_s(value) if isinstance(value, str) else minutes_s(value)


def _memory_bytes(value: Any) -> int | None:
    if isinstance(value, str):
        return text.parse_memory_bytes(value)
    megabytes = number(value)
    return megabytes * 2**20 if megabytes else None


def _flag(value: Any) -> bool:
    return value != "0" if isinstance(value, str) else value


def _user(value: str) -> str:
    """``ada(1000)``, as scontrol prints it, -> ``ada``."""
    return re.sub(r"\(\d+\)$", "", value)


def _reason(value: str) -> str:
    return value.replace(" ", "_")


JOB_FIELDS: Mapping[str, JobField] = {
    "job_id": JobField(
        read=int, json="job_id", scontrol="JobId", sacct="JobIDRaw", pyslurm="id", required=True
    ),
    "name": JobField(
        read=str, json="name", scontrol="JobName", sacct="JobName", pyslurm="name", required=True
    ),
    "user": JobField(
        read=_user,
        json="user_name",
        scontrol="UserId",
        sacct="User",
        pyslurm="user_name",
        required=True,
    ),
    "partition": JobField(
        read=str,
        json="partition",
        scontrol="Partition",
        sacct="Partition",
        pyslurm="partition",
        required=True,
    ),
    "reason": JobField(
        read=_reason, json="state_reason", scontrol="Reason", pyslurm="state_reason"
    ),
    "nodes": JobField(
        read=text.expand_nodes,
        json="nodes",
        scontrol="NodeList",
        sacct="NodeList",
        pyslurm="allocated_nodes",
    ),
    "n_nodes": JobField(
        read=_count, json="node_count", scontrol="NumNodes", sacct="NNodes", pyslurm="num_nodes"
    ),
    "n_tasks": JobField(read=_count, json="tasks", scontrol="NumTasks", pyslurm="ntasks"),
    "n_cpus": JobField(read=_count, json="cpus", scontrol="NumCPUs", sacct="NCPUS", pyslurm="cpus"),
    "submit_epoch_s": JobField(
        read=_moment,
        json="submit_time",
        scontrol="SubmitTime",
        sacct="Submit",
        pyslurm="submit_time",
        required=True,
    ),
    "eligible_epoch_s": JobField(
        read=_moment,
        json="eligible_time",
        scontrol="EligibleTime",
        sacct="Eligible",
        pyslurm="eligible_time",
    ),
    "start_epoch_s": JobField(
        read=_moment,
        json="start_time",
        scontrol="StartTime",
        sacct="Start",
        pyslurm="start_time",
    ),
    "end_epoch_s": JobField(
        read=_moment, json="end_time", scontrol="EndTime", sacct="End", pyslurm="end_time"
    ),
    "time_limit_s": JobField(
        read=_limit_s,
        json="time_limit",
        scontrol="TimeLimit",
        sacct="TimelimitRaw",
        pyslurm="time_limit",
        sacct_read=minutes_s,
    ),
    "restart_count": JobField(
        read=number, json="restart_cnt", scontrol="Restarts", pyslurm="requeue_count"
    ),
    "preempt_epoch_s": JobField(
        read=_moment, json="preempt_time", scontrol="PreemptTime", pyslurm="preempt_time"
    ),
    "suspend_epoch_s": JobField(
        read=_moment, json="suspend_time", scontrol="SuspendTime", pyslurm="suspend_time"
    ),
    "pre_suspend_s": JobField(
        read=number, json="pre_sus_time", scontrol="SecsPreSuspend", pyslurm="pre_suspension_time"
    ),
    "suspended_s": JobField(read=text.parse_duration_s, sacct="Suspended"),
    "work_dir": JobField(
        read=str,
        json="current_working_directory",
        scontrol="WorkDir",
        sacct="WorkDir",
        pyslurm="working_directory",
    ),
    "std_out": JobField(read=str, scontrol="StdOut", pyslurm="standard_output"),
    "std_err": JobField(read=str, scontrol="StdErr", pyslurm="standard_error"),
    "comment": JobField(
        read=str, json="comment", scontrol="Comment", sacct="Comment", pyslurm="comment"
    ),
    "is_batch": JobField(
        read=_flag, json="batch_flag", scontrol="BatchFlag", pyslurm="is_batch_job"
    ),
    "may_requeue": JobField(
        read=_flag, json="requeue", scontrol="Requeue", pyslurm="is_requeueable"
    ),
    "memory_per_node_bytes": JobField(
        read=_memory_bytes,
        json="memory_per_node",
        scontrol="MinMemoryNode",
        pyslurm="memory_per_node",
    ),
    "memory_per_cpu_bytes": JobField(
        read=_memory_bytes, json="memory_per_cpu", scontrol="MinMemoryCPU", pyslurm="memory_per_cpu"
    ),
    "qos": JobField(read=str, json="qos", scontrol="QOS", pyslurm="qos"),
}
"""Attribute of ``Job`` -> where each source has it."""
