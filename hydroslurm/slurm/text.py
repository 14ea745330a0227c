"""Pieces of Slurm's answers -> values, and one table: the name of each ``Job`` attribute in Slurm's
four sources. Pure.

What a source spells in a form of its own (state, exit status, array numbers, output files, GRES) is
read in that source's module.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import product
from typing import Any, Literal, TypeVar

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm.values import Job, JobState

Record = TypeVar("Record")

ABSENT = frozenset({"", "(null)", "null", "None", "NONE", "N/A", "Unknown", "None assigned"})
"""How Slurm's programs print a missing value."""

MAX_NODES = 1_000_000
"""More than any cluster has: a longer range is not a node list."""

_UNBOUNDED = frozenset(
    {"UNLIMITED", "INFINITE", "PARTITION_LIMIT", "NOT_SET", "INVALID", "N/A", "NONE", "(NULL)", ""}
)
_DURATION = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGTPE]?)([nc]?)")
_UNITS = {"K": 2**10, "": 2**20, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50, "E": 2**60}


def parse_duration_s(text: str) -> int | None:
    """The seconds in ``1-02:03:04``, ``02:03:04`` or ``03:04``.

    None for UNLIMITED and for "no limit of its own" (Partition_Limit, N/A, NONE). A bare number is
    refused: Slurm reads it as minutes, but prints minutes in some columns and seconds in others.
    """
    if text.strip().upper() in _UNBOUNDED:
        return None
    found = _DURATION.fullmatch(text.strip())
    if not found:
        raise UnreadableOutput(
            f"not a duration as Slurm prints it: {text!r}; wanted D-HH:MM:SS or UNLIMITED"
        )
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def format_duration(seconds: int | None) -> str:
    """The format that Slurm prints, and that its programs accept as a time limit."""
    if seconds is None:
        return "UNLIMITED"
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02d}:{minute:02d}:{second:02d}"
    return f"{days}-{clock}" if days else clock


def parse_moment(text: str) -> int | None:
    """Epoch seconds of ``1795204093``, or of ``2026-11-20T19:48:13`` in this machine's time zone.

    None for Unknown, None, N/A and 0. Ask Slurm for epoch seconds (SLURM_TIME_FORMAT=%s) where
    possible: local time is ambiguous for an hour every autumn.
    """
    word = text.strip()
    if word in ABSENT:
        return None
    if word.isdecimal():
        return int(word) or None
    try:
        return int(datetime.fromisoformat(word).timestamp())
    except (ValueError, OverflowError) as error:
        raise UnreadableOutput(
            f"not a time as Slurm prints it: {text!r}; wanted epoch seconds or YYYY-MM-DDTHH:MM:SS"
        ) from error


def parse_memory_bytes(text: str) -> int | None:
    """Bytes of ``4Gn``, ``2000M``, ``1.5T`` or ``2000`` (megabytes); None if none was requested.

    The n (per node) or c (per CPU) that sacct appends is ignored.
    """
    word = text.strip()
    if word in ABSENT or word == "UNLIMITED":
        return None
    found = _MEMORY.fullmatch(word)
    if not found:
        raise UnreadableOutput(f"not an amount of memory: {text!r}; wanted 2000M, 4G, 4Gn ...")
    return int(float(found[1]) * _UNITS[found[2]]) or None


def expand_nodes(text: str) -> tuple[str, ...]:
    """``n[1-3,07],m1`` -> (n1, n2, n3, n07, m1), in the order given; () for no nodes."""
    if text.strip() in ABSENT:
        return ()
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\]?|\])+", text.strip()):
        names.extend(_expand_one(item, text))
        if len(names) > MAX_NODES:
            raise UnreadableOutput(f"more than {MAX_NODES} nodes in {text[:80]!r}")
    return tuple(names)


def parse_state(words: str | Sequence[str]) -> tuple[JobState, frozenset[str]]:
    """The state that squeue would show, and all the words given.

    Accepts ``RUNNING``, ``CANCELLED by 1000``, sacct's truncated ``CANCELLED+``, and the list of
    newer JSON, ``["RUNNING", "COMPLETING"]``. A word of no known release gives UNKNOWN. While a
    signal is on its way to the nodes scontrol says SIGNALING, of a job that runs.
    """
    given = [words] if isinstance(words, str) else list(words)
    plain = [word.split(" ")[0].rstrip("+") for word in given if word]
    if not plain:
        raise UnreadableOutput(f"a job without a state: {words!r}")
    known = [JobState(word) for word in plain if word in JobState.__members__]
    if not known:
        return JobState.RUNNING if "SIGNALING" in plain else JobState.UNKNOWN, frozenset(plain)
    state = min(known, key=_RANK.__getitem__)
    return state, frozenset(plain)


def read_record(reader: Callable[[Any], Record], fields: Any, whole: object) -> Record:
    """Apply a reader to one record; the error quotes the whole record.

    Raises:
        UnreadableOutput: a field is missing or malformed.
    """
    try:
        return reader(fields)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise UnreadableOutput(
            f"cannot read this record from Slurm ({type(error).__name__}: {error}): "
            f"{str(whole)[:300]!r}"
        ) from error


def leading_int(value: str) -> int | None:
    """``2`` of ``2-4``, a pending job's node count; None without a number."""
    found = re.match(r"\d+", value)
    return int(found[0]) if found else None


def parse_exit(value: str) -> int | None:
    """``Job.exit_code`` of ``143:0``, exit status and signal."""
    code, _, signal = value.partition(":")
    return job_exit_code(int(code)) if code and signal else None


def job_exit_code(status: int) -> int:
    """``Job.exit_code`` for an exit status of 0 to 255."""
    return status - 128 if status >= 128 else status


def join_gres(asked: Iterable[str]) -> str:
    """``gres:gpu:2`` and ``gres/gpu=2,cpu=1`` -> ``gpu:2``, each kind once; anything else is
    skipped."""
    words = [word for each in asked for word in each.split(",")]
    names = [re.sub(r"^gres[:/]", "", w).replace("=", ":") for w in words if w.startswith("gres")]
    return ",".join(dict.fromkeys(names))


_RANK = {state: rank for rank, state in enumerate(JobState)}


def _expand_one(item: str, whole: str) -> list[str]:
    """One element: fixed text and bracketed ranges; the leftmost range varies slowest."""
    parts: list[list[str]] = []
    count = 1
    for piece in re.split(r"(\[[^\]]*\])", item):
        if piece.startswith("[") and piece.endswith("]"):
            parts.append(_expand_ranges(piece[1:-1], whole))
        elif "[" in piece or "]" in piece:
            raise UnreadableOutput(f"unbalanced brackets in the node list {whole!r}")
        else:
            parts.append([piece])
        count *= len(parts[-1])
        if count > MAX_NODES:
            raise UnreadableOutput(f"more than {MAX_NODES} nodes in {whole[:80]!r}")
    return ["".join(choice) for choice in product(*parts)]


def _expand_ranges(inner: str, whole: str) -> list[str]:
    numbers: list[str] = []
    for item in inner.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        low, high = (found[1], found[2] or found[1]) if found else ("1", "0")
        if not found or int(high) < int(low) or int(high) - int(low) > MAX_NODES:
            raise UnreadableOutput(f"not a range of numbers: {item!r} in the node list {whole!r}")
        numbers.extend(f"{n:0{len(low)}d}" for n in range(int(low), int(high) + 1))
    return numbers


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
            wrap this in ``read_record``.
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
    return leading_int(value) if isinstance(value, str) else number(value)


def _moment(value: Any) -> int | None:
    return parse_moment(value) if isinstance(value, str) else number(value) or None


def _limit_s(value: Any) -> int | None:
    return parse_duration_s(value) if isinstance(value, str) else minutes_s(value)


def _memory_bytes(value: Any) -> int | None:
    if isinstance(value, str):
        return parse_memory_bytes(value)
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
    return "" if value in ABSENT else value


def _reason(value: str) -> str:
    return value.replace(" ", "_")


JOB_FIELDS: Mapping[str, JobField] = {
    # attribute: reader, then the name in squeue --json, scontrol, sacct and pyslurm; "" for none
    "job_id": JobField(int, "job_id", "JobId", "JobIDRaw", "id", required=True),
    "name": JobField(str, "name", "JobName", "JobName", "name", required=True),
    "user": JobField(_user, "user_name", "UserId", "User", "user_name", required=True),
    "partition": JobField(str, "partition", "Partition", "Partition", "partition", required=True),
    "reason": JobField(_reason, "state_reason", "Reason", "", "state_reason"),
    "nodes": JobField(expand_nodes, "nodes", "NodeList", "NodeList", "allocated_nodes"),
    "node_list": JobField(_node_list, "nodes", "NodeList", "NodeList", "allocated_nodes"),
    "excluded_nodes": JobField(_node_list, "excluded_nodes", "ExcNodeList", "", "excluded_nodes"),
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
    "suspended_s": JobField(parse_duration_s, "", "", "Suspended"),
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
