"""What scontrol prints of jobs, partitions and the configuration -> frozen values. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.config import Config
from hydroslurm.slurm.text import job_of_fields
from hydroslurm.slurm.values import Job, Partition

# Fields of `scontrol show job` that stand on a line of their own and may hold anything, "Key=" and
# newlines included. From the first of them to StdOut there are no other lines.
_FREE = re.compile(
    r"   (Command|SubmitLine|WorkDir|(?:Admin|System)?Comment|Extra|StdErr|StdIn|StdOut)=(.*)"
)
# what may follow them, and names what a job asked for
_TAIL = re.compile(r"   (Power|TresPer(?:Job|Node|Socket|Task)|MailUser)=")
_TRES_PER = ("TresPerJob", "TresPerNode", "TresPerSocket", "TresPerTask")
_RECORD_START = re.compile(r"\n[^\S\n]*\n(?=JobId=\d+ [^\n]*\n   (?:UserId|SLUID|HetJobIdSet)=)")
_FIRST_LINE = re.compile(
    r"JobId=(?P<JobId>\d+) (?:ArrayJobId=(?P<ArrayJobId>\d+) ArrayTaskId=(?P<ArrayTaskId>\S+) )?"
    r"(?:ArrayTaskThrottle=\d+ )?"
    r"(?:HetJobId=(?P<HetJobId>\d+) HetJobOffset=(?P<HetJobOffset>\d+) )?JobName=(?P<JobName>.*)"
)
_PAIR = re.compile(r"(?:^|(?<=\s))([A-Za-z][\w/:]*)=")


def read_jobs(output: str) -> tuple[Job, ...]:
    """Read ``scontrol show job`` (the form with several lines to a job).

    With ``-o`` a comment of ``a StdOut=/b`` cannot be told from two fields; here such fields have a
    line of their own. What remains: a comment may hold newlines and so a whole false record, which
    is why many jobs of many users are read from JSON where that is possible.

    Raises:
        UnreadableOutput: a field that is needed is missing or malformed.
    """
    if not output.strip() or output.startswith("No jobs in the system"):
        return ()
    blocks = _RECORD_START.split(output.strip("\n"))
    return tuple(text.read_record(_job_of_text, _job_fields(block), block) for block in blocks)


def read_partitions(output: str) -> tuple[Partition, ...]:
    """Read ``scontrol show partition -o``.

    Raises:
        UnreadableOutput: a field that is needed is missing or malformed.
    """
    lines = [line for line in output.splitlines() if line.startswith("PartitionName=")]
    return tuple(text.read_record(_partition_of_fields, _pairs(line), line) for line in lines)


def read_config(output: str) -> Config:
    """Read ``scontrol show config``, its cgroup and MPI sections included; the first of two wins.

    Raises:
        UnreadableOutput: nothing in it looks like a setting.
    """
    entries: dict[str, str] = {}
    for found in re.finditer(r"^([A-Za-z_][\w\[\]]*)\s*=[ ]?(.*)$", output, re.MULTILINE):
        value = found[2].strip()
        entries.setdefault(found[1], "" if value == "(null)" else value)
    if "SLURM_VERSION" not in entries:
        raise UnreadableOutput(f"scontrol show config printed no configuration: {output[:200]!r}")
    return Config(entries)


def read_node_address(output: str) -> str:
    """Read NodeAddr of ``scontrol show node -o NAME``.

    Raises:
        UnreadableOutput: it is not there.
    """
    address = _pairs(output.strip()).get("NodeAddr")
    if not address:
        raise UnreadableOutput(f"scontrol show node: no NodeAddr in {output[:200]!r}")
    return address


def _job_fields(block: str) -> dict[str, str]:
    """Key -> value of one record; the lines that follow a free field and are none belong to it."""
    first, *lines = block.split("\n")
    found = _FIRST_LINE.match(first)
    if not found:
        raise UnreadableOutput(f"scontrol show job: no job in {first[:200]!r}")
    fields = {key: value for key, value in found.groupdict().items() if value is not None}
    open_key = "JobName"
    for line in lines:
        free = _FREE.fullmatch(line)
        if free:
            # a comment may hold a line that looks like StdOut; Slurm prints the true one after it
            open_key = free[1]
            fields[open_key] = free[2]
        elif fields.get("BatchFlag") == "0" and _TAIL.match(line):
            # srun and salloc have no StdOut, after which the free fields would be over
            fields.update(_pairs(line.strip()))
            open_key = ""
        elif open_key not in ("", "JobName", "StdOut") or not line.startswith("   "):
            # more of a field that holds newlines
            if open_key and line.strip():
                fields[open_key] += "\n" + line
        else:
            fields.update(_pairs(line.strip()))
            open_key = ""
    return fields


def _pairs(line: str) -> dict[str, str]:
    """``A=1 B=two words C=`` -> values up to the next ``Key=``; the first of two wins."""
    marks = list(_PAIR.finditer(line))
    fields: dict[str, str] = {}
    for mark, after in zip_longest(marks, marks[1:]):
        end = after.start() if after else len(line)
        fields.setdefault(mark[1], line[mark.end() : end].strip())
    return fields


def _job_of_text(fields: Mapping[str, str]) -> Job:
    state, flags = text.parse_state(fields["JobState"])
    array_task = fields.get("ArrayTaskId", "")
    job = job_of_fields(
        "scontrol",
        lambda name, required: fields[name] if required else _present(fields.get(name)),
        state=state,
        flags=flags,
        exit_code=text.parse_exit(fields.get("ExitCode", "")),
        array_job_id=int(fields["ArrayJobId"]) if "ArrayJobId" in fields else None,
        array_task_id=int(array_task) if array_task.isdecimal() else None,
        array_tasks="" if array_task.isdecimal() else array_task,
        het_job_id=int(fields["HetJobId"]) if "HetJobId" in fields else None,
        het_component=int(fields["HetJobOffset"]) if "HetJobOffset" in fields else None,
        gres=text.join_gres(_present(fields.get(name)) or "" for name in _TRES_PER),
    )
    # 22.05 pads the comment with one space; 25.11 prints no StdErr for a job without one of its own
    return replace(job, comment=job.comment.removesuffix(" "), std_err=job.std_err or job.std_out)


def _present(value: str | None) -> str | None:
    return None if value == "(null)" else value


def _partition_of_fields(fields: Mapping[str, str]) -> Partition:
    return Partition(
        name=fields["PartitionName"],
        state=fields["State"],
        priority_tier=int(fields["PriorityTier"]),
        preempt_mode=fields["PreemptMode"],
        grace_time_s=int(fields["GraceTime"]),
        nodes=text.expand_nodes(fields.get("Nodes", "")),
        max_time_s=text.parse_duration_s(fields["MaxTime"]),
        is_default=fields["Default"] == "YES",
    )
