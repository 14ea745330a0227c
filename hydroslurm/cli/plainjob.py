"""What ``describe`` prints of a job without a spec, and what it prints of any job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from hydroslurm.core.files import clean

if TYPE_CHECKING:
    from hydroslurm.jobs.control.overview import Found
    from hydroslurm.jobs.control.plain_job import PlainAttempt, PlainJob

_MANY = 16
"""So many ranks and attempts are listed; more are counted."""


def description(found: PlainJob) -> list[str]:
    """The lines about it."""
    from hydroslurm.cli.job import rank_line

    lines = of_slurm(found, found.name)
    if found.submission is not None:
        lines.append(f"Command:      {clean(found.submission.command)}")
    slurm = found.slurm
    files = dict.fromkeys(filter(None, (slurm.std_out, slurm.std_err))) if slurm else ()
    lines += [f"Output:       {file}" for file in files]
    lines.append(f"At a stop:    {_saver(found)}")
    if found.committed is not None:
        step = found.committed.data.get("checkpoint_step")
        lines.append(f"Checkpoint:   step {step}, committed {moment(found.committed.epoch_ns)}")
    if slurm is not None:
        lines.append(f"Restarts:     {slurm.restart_count}")
    lines.append(f"Preemptions:  {found.preemptions}")
    lines.append(f"Ranks:        {len(found.ranks) or 'none has announced itself'}")
    now_ns = time.time_ns()
    lines += [f"  {rank_line(one, now_epoch_ns=now_ns)}" for one in found.ranks[:_MANY]]
    lines += [f"  ... {len(found.ranks) - _MANY} more"] if len(found.ranks) > _MANY else []
    left_out = len(found.attempts) - _MANY
    more = f"; {left_out} before these" if left_out > 0 else ""
    lines.append(f"Attempts:     starts of the ranks, counted over restarts and requeues{more}")
    lines += [f"  {_attempt_line(one)}" for one in found.attempts[-_MANY:]] or ["  none yet"]
    lines += condition_lines(found)
    return [line.rstrip() for line in lines]


def of_slurm(found: Found, name: str) -> list[str]:
    """What Slurm says of any job, and where its run folder is."""
    from hydroslurm.slurm.text import compress_nodes

    slurm = found.slurm
    lines = [f"Name:         {name}"]
    if slurm is None:
        lines.append("Slurm:        knows nothing of it, or cannot be asked")
    else:
        waits = f" ({slurm.reason})" if slurm.reason not in ("", "None") else ""
        where = f" on {compress_nodes(slurm.nodes)}" if slurm.nodes else waits
        lines.append(f"Slurm:        job {slurm.job_id}, {slurm.state.value}{where}")
        lines.append(f"Partition:    {slurm.partition}{f', QOS {slurm.qos}' if slurm.qos else ''}")
    return [*lines, f"Run folder:   {found.run.root}"]


def condition_lines(found: Found) -> list[str]:
    """What became of any job, and when."""
    lines = ["Conditions:"]
    for one in found.conditions:
        reason = f" {one.reason}" if one.reason else ""
        message = f": {clean(one.message)}" if one.message else ""
        lines.append(f"  {moment(one.epoch_ns)}  {one.type}{reason}{message}")
    return lines if found.conditions else [*lines, "  none"]


def moment(epoch_ns: int) -> str:
    """In the local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(epoch_ns / 1e9))


def _saver(found: PlainJob) -> str:
    from hydroslurm.core.events import EventKind

    if found.saver is EventKind.ATTEMPT_BEGAN:
        return "its hydroslurm.Run saves"
    if found.saver is EventKind.STOPS_TAKEN:
        return "the script saves in its own way (receive_suspend_command)"
    return "nobody saves: no rank has made a hydroslurm.Run, or called receive_suspend_command()"


def _attempt_line(one: PlainAttempt) -> str:
    began = "" if one.began_epoch_s is None else f"{moment(int(one.began_epoch_s * 1e9))}"
    ended = "" if one.ended_epoch_s is None else f" to {moment(int(one.ended_epoch_s * 1e9))}"
    step = "" if one.step is None else f", at step {one.step}"
    return f"{one.number}  {began}{ended}: {clean(one.message)}{step}"
