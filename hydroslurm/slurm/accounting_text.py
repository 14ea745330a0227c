"""What sacct prints of jobs, and sacctmgr of qualities of service -> frozen values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.job_fields import job_of_fields
from hydroslurm.slurm.values import Job, Qos

FIELDS = (
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
    "TimelimitRaw",
    "ExitCode",
    "NodeList",
    "NNodes",
    "NCPUS",
    "Comment",
    "JobName",
    "WorkDir",
)
"""The columns of sacct that ``read_attempts`` reads, in this order."""

QOS_FIELDS = ("Name", "GraceTime", "PreemptMode", "Preempt")
"""The columns of sacctmgr that ``read_qoses`` reads, in this order."""

DELIMITER = "\x1f"
"""ASCII's unit separator: a name, a comment or a path may hold any printable delimiter."""


def read_attempts(output: str) -> tuple[Job, ...]:
    """Read ``sacct -D -X -P -n -o FIELDS``: one entry for each attempt of a job, oldest first.

    ``restart_count`` is the number of attempts before, for sacct of 22.05 does not tell it.

    Raises:
        UnreadableOutput: a row with another number of columns.
    """
    rows = list(_sacct_rows(output))
    jobs = [text.read_record(_job_of_sacct, row, repr(row)) for row in rows]
    jobs.sort(key=lambda job: (job.job_id, job.submit_epoch_s or 0, job.start_epoch_s or 0))
    attempts: dict[int, int] = {}
    counted = []
    for job in jobs:
        nth = attempts[job.job_id] = attempts.get(job.job_id, -1) + 1
        counted.append(replace(job, restart_count=nth))
    return tuple(counted)


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
        if len(cells) == len(FIELDS):
            yield cells
            held = ""
    if held:
        raise UnreadableOutput(f"sacct printed a row without {len(FIELDS)} columns: {held[:200]!r}")


def _job_of_sacct(cells: list[str]) -> Job:
    cell = dict(zip(FIELDS, cells, strict=True))
    state, flags = text.parse_state(cell["State"])
    code, signal = text.parse_exit(cell["ExitCode"])
    array = re.fullmatch(r"(\d+)_(\d+|\[.*\])", cell["JobID"])
    by = re.fullmatch(r"CANCELLED by (\d+)", cell["State"])
    return job_of_fields(
        "sacct",
        lambda name, _: cell[name],
        state=state,
        flags=flags,
        exit_code=code,
        exit_signal=signal,
        array_job_id=int(array[1]) if array else None,
        array_task_id=int(array[2]) if array and array[2].isdecimal() else None,
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
    )
