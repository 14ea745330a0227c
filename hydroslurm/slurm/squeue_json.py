"""What ``squeue --json`` prints -> frozen values. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
from hydroslurm.slurm.job_fields import job_of_fields, number
from hydroslurm.slurm.values import Job

_TRES_PER = ("job", "node", "socket", "task")
_FILENAME = re.compile(r"%(\d*)([Aajux])")


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
    return tuple(text.read_record(_job_of_json, row, str(row)) for row in rows)


def _job_of_json(row: Mapping[str, Any]) -> Job:
    state, flags = text.parse_state(row["job_state"])
    code, signal = _exit_of_json(row.get("exit_code"))
    array_id = number(row.get("array_job_id")) or None
    reason = row.get("state_description") or row.get("state_reason") or ""
    job = job_of_fields(
        "json",
        lambda name, required: row[name] if required else row.get(name),
        state=state,
        flags=flags,
        reason=reason.replace(" ", "_"),
        exit_code=code,
        exit_signal=signal,
        array_job_id=array_id,
        array_task_id=number(row.get("array_task_id")) if array_id else None,
        gres=text.join_gres(row.get(f"tres_per_{what}") or "" for what in _TRES_PER),
    )
    return _with_files(job, row)


def _exit_of_json(value: Any) -> tuple[int | None, int | None]:
    """The wait status of 22.05, or the object of later ones."""
    if isinstance(value, Mapping):
        code = number(value.get("return_code")) or 0
        signal = number((value.get("signal") or {}).get("id")) or 0
        return text.job_exit_code(code), signal
    if value is None:
        return None, None
    status = int(value)
    return text.job_exit_code(status >> 8 & 0xFF), status & 0x7F


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
