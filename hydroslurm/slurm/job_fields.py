"""One table: the name of each ``Job`` attribute in Slurm's four sources. Pure.

What a source spells in a form of its own (state, exit status, array numbers, output files, GRES) is
read in that source's module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hydroslurm.slurm import text
from hydroslurm.slurm.values import Job

Source = Literal["json", "scontrol", "sacct", "pyslurm"]
Read = Callable[[Any], Any]


@dataclass(frozen=True)
class JobField:
    """Where one attribute of ``Job`` comes from; a source with an empty name does not have it.

    Attributes:
        read: turns the value of any source into ours; never called with None.
        json, scontrol, sacct, pyslurm: its name in each source.
        required: a record of squeue or scontrol without it is unreadable.
    """

    read: Read
    json: str = ""
    scontrol: str = ""
    sacct: str = ""
    pyslurm: str = ""
    required: bool = False


def job_of_fields(source: Source, get: Callable[[str, bool], Any], **special: Any) -> Job:
    """Read one record through the table.

    Args:
        get: maps a name, and whether it is required, to the source's value; None: not given.
        special: attributes that the source's module has read itself.

    Raises:
        KeyError, ValueError, TypeError, AttributeError: a field is missing or malformed; callers
            wrap this in ``text.read_record``.
    """
    values: dict[str, Any] = {}
    for attribute, name, read, required in _fields_of(source):
        given = get(name, required)
        value = None if given is None else read(given)
        if value is not None:  # otherwise Job's own default, "not given"
            values[attribute] = value
    return Job(**values | special)


@functools.cache  # top reads a thousand records at a time
def _fields_of(source: Source) -> tuple[tuple[str, str, Read, bool], ...]:
    """Attribute, name there, reader, and whether a record must have it."""
    return tuple(
        (attribute, name, field.read, field.required)
        for attribute, field in JOB_FIELDS.items()
        if (name := getattr(field, source))
    )


def number(value: Any) -> int | None:
    """``5``, ``"5"`` or ``{"set": true, "infinite": false, "number": 5}``; None for no limit."""
    if isinstance(value, Mapping):
        value = value["number"] if value.get("set") and not value.get("infinite") else None
    if value == "UNLIMITED":  # pyslurm's word
        return None
    return None if value is None else int(value)


def minutes_s(value: Any) -> int | None:
    """Seconds of a number of minutes; None for none, or no limit."""
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
    """``ada(1000)``, as scontrol prints it, -> ``ada``; the number of a user without a name, who is
    ``nobody(12345)`` there."""
    unnamed = re.fullmatch(r"nobody\((\d+)\)", value)
    if unnamed is not None and unnamed[1] != "65534":
        return unnamed[1]
    return re.sub(r"\(\d+\)$", "", value)


def _node_list(value: str) -> str:
    return "" if value in text.ABSENT else value


def _reason(value: str) -> str:
    return value.replace(" ", "_")


JOB_FIELDS: Mapping[str, JobField] = {
    # attribute: reader, then the name in squeue --json, scontrol, sacct and pyslurm; "" for none
    "job_id": JobField(int, "job_id", "JobId", "JobIDRaw", "id", required=True),
    "name": JobField(str, "name", "JobName", "JobName", "name", required=True),
    "user": JobField(_user, "user_name", "UserId", "User", "user_name", required=True),
    "partition": JobField(str, "partition", "Partition", "Partition", "partition", required=True),
    "reason": JobField(_reason, "state_reason", "Reason", "", "state_reason"),
    "nodes": JobField(text.expand_nodes, "nodes", "NodeList", "NodeList", "allocated_nodes"),
    "node_list": JobField(_node_list, "nodes", "NodeList", "NodeList", "allocated_nodes"),
    "n_nodes": JobField(_count, "node_count", "NumNodes", "NNodes", "num_nodes"),
    "n_tasks": JobField(_count, "tasks", "NumTasks", "", "ntasks"),
    "n_cpus": JobField(_count, "cpus", "NumCPUs", "NCPUS", "cpus"),
    "submit_epoch_s": JobField(
        _moment, "submit_time", "SubmitTime", "Submit", "submit_time", required=True
    ),
    "eligible_epoch_s": JobField(
        _moment, "eligible_time", "EligibleTime", "Eligible", "eligible_time"
    ),
    "start_epoch_s": JobField(_moment, "start_time", "StartTime", "Start", "start_time"),
    "end_epoch_s": JobField(_moment, "end_time", "EndTime", "End", "end_time"),
    "time_limit_s": JobField(_limit_s, "time_limit", "TimeLimit", "Timelimit", "time_limit"),
    "restart_count": JobField(number, "restart_cnt", "Restarts", "", "requeue_count"),
    "preempt_epoch_s": JobField(_moment, "preempt_time", "PreemptTime", "", "preempt_time"),
    "suspend_epoch_s": JobField(_moment, "suspend_time", "SuspendTime", "", "suspend_time"),
    "suspended_s": JobField(text.parse_duration_s, "", "", "Suspended"),
    "work_dir": JobField(
        str, "current_working_directory", "WorkDir", "WorkDir", "working_directory"
    ),
    "std_out": JobField(str, "", "StdOut", "", "standard_output"),
    "std_err": JobField(str, "", "StdErr", "", "standard_error"),
    "comment": JobField(str, "comment", "Comment", "Comment", "comment"),
    "is_batch": JobField(_flag, "batch_flag", "BatchFlag", "", "is_batch_job"),
    "may_requeue": JobField(_flag, "requeue", "Requeue", "", "is_requeueable"),
    "memory_per_node_bytes": JobField(
        _memory_bytes, "memory_per_node", "MinMemoryNode", "", "memory_per_node"
    ),
    "memory_per_cpu_bytes": JobField(
        _memory_bytes, "memory_per_cpu", "MinMemoryCPU", "", "memory_per_cpu"
    ),
    "qos": JobField(str, "qos", "QOS", "", "qos"),
}
"""Attribute of ``Job`` -> where each source has it."""
