"""What ``squeue --json`` prints -> frozen values. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm import text
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
    minutes = _number(row.get("time_limit"))
    array_id = _number(row.get("array_job_id")) or None
    job = Job(
        job_id=int(row["job_id"]),
        state=state,
        flags=flags,
        name=row["name"] or "",
        user=row["user_name"] or "",
        partition=row["partition"] or "",
        reason=(row.get("state_description") or row.get("state_reason") or "").replace(" ", "_"),
        nodes=text.expand_nodes(row.get("nodes") or ""),
        n_nodes=_number(row.get("node_count")),
        n_tasks=_number(row.get("tasks")),
        n_cpus=_number(row.get("cpus")),
        submit_epoch_s=_number(row["submit_time"]) or None,
        eligible_epoch_s=_number(row.get("eligible_time")) or None,
        start_epoch_s=_number(row.get("start_time")) or None,
        end_epoch_s=_number(row.get("end_time")) or None,
        time_limit_s=minutes * 60 if minutes else None,
        restart_count=_number(row.get("restart_cnt")) or 0,
        preempt_epoch_s=_number(row.get("preempt_time")) or None,
        suspend_epoch_s=_number(row.get("suspend_time")) or None,
        pre_suspend_s=_number(row.get("pre_sus_time")) or 0,
        work_dir=row.get("current_working_directory") or "",
        comment=row.get("comment") or "",
        exit_code=code,
        exit_signal=signal,
        array_job_id=array_id,
        array_task_id=_number(row.get("array_task_id")) if array_id else None,
        is_batch=row.get("batch_flag"),
        may_requeue=row.get("requeue"),
        memory_per_node_bytes=_megabytes(row.get("memory_per_node")),
        memory_per_cpu_bytes=_megabytes(row.get("memory_per_cpu")),
        qos=row.get("qos") or "",
        gres=text.join_gres(row.get(f"tres_per_{what}") or "" for what in _TRES_PER),
    )
    return _with_files(job, row)


def _number(value: Any) -> int | None:
    """``5``, ``null`` or ``{"set": true, "infinite": false, "number": 5}``; infinite is None."""
    if isinstance(value, Mapping):
        value = value["number"] if value.get("set") and not value.get("infinite") else None
    return None if value is None else int(value)


def _megabytes(value: Any) -> int | None:
    number = _number(value)
    return number * 2**20 if number else None


def _exit_of_json(value: Any) -> tuple[int | None, int | None]:
    """The wait status of 22.05, or the object of later ones."""
    if isinstance(value, Mapping):
        code = _number(value.get("return_code")) or 0
        signal = _number((value.get("signal") or {}).get("id")) or 0
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
