"""What sacct prints of the lives of jobs -> frozen values. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.values import Job

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
"""The columns that ``read_lives`` reads, in this order."""

DELIMITER = "\x1f"
"""ASCII's unit separator: a name, a comment or a path may hold any printable delimiter."""


def read_lives(output: str) -> tuple[Job, ...]:
    """Read ``sacct -D -X -P -n -o FIELDS``: one entry for each life of a job, oldest first.

    ``restart_count`` is the number of lives before, for sacct of 22.05 does not tell it.

    Raises:
        UnreadableOutput: a row with another number of columns.
    """
    rows = list(_sacct_rows(output))
    jobs = [text.read_record(_job_of_sacct, row, repr(row)) for row in rows]
    jobs.sort(key=lambda job: (job.job_id, job.submit_epoch_s or 0, job.start_epoch_s or 0))
    lives: dict[int, int] = {}
    counted = []
    for job in jobs:
        nth = lives[job.job_id] = lives.get(job.job_id, -1) + 1
        counted.append(replace(job, restart_count=nth))
    return tuple(counted)


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
    minutes = cell["TimelimitRaw"]
    by = re.fullmatch(r"CANCELLED by (\d+)", cell["State"])
    return Job(
        job_id=int(cell["JobIDRaw"]),
        state=state,
        flags=flags,
        name=cell["JobName"],
        user=cell["User"],
        partition=cell["Partition"],
        nodes=text.expand_nodes(cell["NodeList"]),
        n_nodes=text.leading_int(cell["NNodes"]),
        n_cpus=text.leading_int(cell["NCPUS"]),
        submit_epoch_s=text.parse_moment(cell["Submit"]),
        eligible_epoch_s=text.parse_moment(cell["Eligible"]),
        start_epoch_s=text.parse_moment(cell["Start"]),
        end_epoch_s=text.parse_moment(cell["End"]),
        suspended_s=text.parse_duration_s(cell["Suspended"]),
        time_limit_s=int(minutes) * 60 if minutes.isdecimal() else None,
        work_dir=cell["WorkDir"],
        comment=cell["Comment"],
        exit_code=code,
        exit_signal=signal,
        array_job_id=int(array[1]) if array else None,
        cancelled_by_uid=int(by[1]) if by else None,
        array_task_id=int(array[2]) if array and array[2].isdecimal() else None,
    )
