"""What ``squeue --json``, sacct and sacctmgr print -> frozen values. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hydroslurm.core.jobid import JobId
from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.text import job_of_fields, number
from hydroslurm.slurm.values import Element, Job, Qos

SACCT_FIELDS = (
    "JobIDRaw",
    "JobID",
    "User",
    "Partition",
    "State",
    "Submit",
    "Eligible",
    "Start",
    "End",
    "Suspended",
    "Timelimit",
    "ExitCode",
    "NodeList",
    "NNodes",
    "NCPUS",
    "Comment",
    "JobName",
    "WorkDir",
)
"""The columns of sacct that ``read_attempts`` reads, in this order."""

QOS_FIELDS = ("Name", "GraceTime", "PreemptMode", "Preempt", "PreemptExemptTime")
"""The columns of sacctmgr that ``read_qoses`` reads, in this order."""

DELIMITER = "\x1f"
"""Separates sacct's columns: names, comments and paths may hold any printable delimiter."""
_TRES_PER = ("job", "node", "socket", "task")
_FILENAME = re.compile(r"%(\d*)([Aajux])")


def read_attempts(output: str) -> tuple[Job, ...]:
    """Read ``sacct -D -X -P -n -o SACCT_FIELDS``: one entry for each attempt of a job, oldest
    first.

    ``restart_count`` is the number of attempts before, for sacct of 22.05 does not tell it.

    Raises:
        UnreadableOutput: a row with another number of columns.
    """
    rows = list(_sacct_rows(output))
    jobs = [text.read_record(_job_of_sacct, row, row) for row in rows]
    jobs.sort(key=lambda job: (job.job_id, job.submit_epoch_s or 0, job.start_epoch_s or 0))
    attempts: dict[int, int] = {}
    counted = []
    for job in jobs:
        nth = attempts[job.job_id] = attempts.get(job.job_id, -1) + 1
        counted.append(replace(job, restart_count=nth))
    return tuple(counted)


ELEMENT_FORMAT = "%F|%K|%T|%N|%r"
"""What ``read_elements`` reads: neither a node nor a reason holds a ``|``."""


def read_elements(output: str) -> tuple[Element, ...]:
    """Read ``squeue --array --noheader --format=ELEMENT_FORMAT``.

    Raises:
        UnreadableOutput: a line with another number of columns.
    """
    found = []
    for line in filter(None, output.splitlines()):
        cells = line.split("|")
        if len(cells) != 5:
            raise UnreadableOutput(f"squeue printed a line without 5 columns: {line[:200]!r}")
        array, task, state, node, reason = cells
        if array.isdecimal() and task.isdecimal():  # else it is no array's
            parsed, _ = text.parse_state(state)
            name = str(JobId(int(array), int(task)))
            found.append(Element(name=name, state=parsed, node=node, reason=reason))
    return tuple(found)


def read_qoses(output: str) -> tuple[Qos, ...]:
    """Read ``sacctmgr -n -P show qos format=QOS_FIELDS``.

    Raises:
        UnreadableOutput: a row with another number of columns.
    """
    return tuple(
        text.read_record(_qos_of_cells, line.split("|"), line)
        for line in output.splitlines()
        if line.strip()
    )


def _sacct_rows(output: str) -> Iterator[list[str]]:
    """Rows of the right length; a newline inside a comment, a name or a path is put back."""
    held = ""
    for line in output.rstrip("\n").split("\n") if output.strip() else []:
        held = f"{held}\n{line}" if held else line
        cells = held.split(DELIMITER)
        if len(cells) == len(SACCT_FIELDS):
            yield cells
            held = ""
    if held:
        raise UnreadableOutput(
            f"sacct printed a row without {len(SACCT_FIELDS)} columns: {held[:200]!r}"
        )


def _job_of_sacct(cells: list[str]) -> Job:
    cell = dict(zip(SACCT_FIELDS, cells, strict=True))
    state, flags = text.parse_state(cell["State"])
    array = re.fullmatch(r"(\d+)_(?:(\d+)|\[(.*)\])", cell["JobID"])
    het = re.fullmatch(r"(\d+)\+(\d+)", cell["JobID"])
    by = re.fullmatch(r"CANCELLED by (\d+)", cell["State"])
    return job_of_fields(
        "sacct",
        lambda name, _: cell[name],
        state=state,
        flags=flags,
        exit_code=text.parse_exit(cell["ExitCode"]),
        array_job_id=int(array[1]) if array else None,
        array_task_id=int(array[2]) if array and array[2] else None,
        array_tasks=(array and array[3]) or "",
        het_job_id=int(het[1]) if het else None,
        het_component=int(het[2]) if het else None,
        cancelled_by_uid=int(by[1]) if by else None,
    )


def _qos_of_cells(cells: list[str]) -> Qos:
    if len(cells) != len(QOS_FIELDS):
        raise UnreadableOutput(
            f"sacctmgr printed a row without {len(QOS_FIELDS)} columns: {cells!r}"
        )
    cell = dict(zip(QOS_FIELDS, cells, strict=True))
    mode = cell["PreemptMode"].upper()
    return Qos(
        name=cell["Name"],
        grace_time_s=text.parse_duration_s(cell["GraceTime"]) or 0,
        # "cluster" is how a QOS without a mode of its own prints
        preempt_mode="" if mode == "CLUSTER" else mode,
        preempts=tuple(name for name in cell["Preempt"].split(",") if name),
        exempt_s=text.parse_duration_s(cell["PreemptExemptTime"]),
    )


def read_jobs(output: str) -> tuple[Job, ...]:
    """Read ``squeue --json`` of 22.05 (plain numbers) and of later ones (numbers as objects).

    Raises:
        UnreadableOutput: not JSON, another form, or an answer that carries errors. 22.05 reports an
            unreachable controller so, with exit status 0 and the words "Unspecified error".
    """
    try:
        answer = json.loads(output)
        errors, rows = answer.get("errors") or [], list(answer["jobs"])
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnreadableOutput(
            f"squeue --json printed no list of jobs: {output[:200]!r}"
        ) from error
    if errors:
        raise UnreadableOutput(f"squeue --json answered with errors: {errors!r}")
    return tuple(text.read_record(_job_of_json, row, row) for row in rows)


def _job_of_json(row: Mapping[str, Any]) -> Job:
    state, flags = text.parse_state(row["job_state"])
    array_id = number(row.get("array_job_id")) or None
    task = number(row.get("array_task_id")) if array_id else None
    het_id = number(row.get("het_job_id")) or None
    reason = row.get("state_description") or row.get("state_reason") or ""
    job = job_of_fields(
        "json",
        lambda name, required: row[name] if required else row.get(name),
        state=state,
        flags=flags,
        user=row["user_name"] or str(row.get("user_id", "")),
        reason=reason.replace(" ", "_"),
        exit_code=_exit_of_json(row.get("exit_code")),
        array_job_id=array_id,
        array_task_id=task,
        array_tasks=row.get("array_task_string") or "" if task is None else "",
        het_job_id=het_id,
        het_component=number(row.get("het_job_offset")) if het_id else None,
        gres=text.join_gres(row.get(f"tres_per_{what}") or "" for what in _TRES_PER),
    )
    return _with_files(job, row)


def _exit_of_json(value: Any) -> int | None:
    """From the wait status of 22.05, or the object of later ones."""
    if isinstance(value, Mapping):
        return text.job_exit_code(number(value.get("return_code")) or 0)
    return None if value is None else text.job_exit_code(int(value) >> 8 & 0xFF)


def _with_files(job: Job, row: Mapping[str, Any]) -> Job:
    """Fill in where stdout and stderr go: told by newer releases, else as scontrol does."""
    out = row.get("stdout_expanded") or row.get("standard_output") or ""
    err = row.get("stderr_expanded") or row.get("standard_error") or ""
    if not out and job.is_batch:
        out = "slurm-%A_%a.out" if job.array_job_id else "slurm-%j.out"
    if "stdout_expanded" not in row:
        out, err = expand_filename(out, job=job), expand_filename(err, job=job)
    return replace(job, std_out=out, std_err=err or out)


def expand_filename(pattern: str, *, job: Job) -> str:
    """Fill in ``%j %A %a %x %u`` and put the working directory in front of a relative name.

    The rest (``%N``, ``%t`` ...) is known only where the file is opened, and stays as it is, as in
    scontrol's output.
    """
    if not pattern:
        return ""
    # the record for tasks that have not started has no number; scontrol prints Slurm's NO_VAL there
    task = 0xFFFFFFFE if job.array_task_id is None else job.array_task_id
    values = {
        "A": str(job.array_job_id or job.job_id),
        "a": str(task),
        "j": str(job.job_id),
        "u": job.user,
        "x": job.name,
    }
    named = _FILENAME.sub(lambda found: values[found[2]].zfill(int(found[1] or 0)), pattern)
    return named if named.startswith("/") else f"{job.work_dir}/{named}"
