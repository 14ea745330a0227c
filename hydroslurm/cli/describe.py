"""``hydroslurm describe | list``: what jobs were asked for, and what became of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import typer

from hydroslurm.cli.job import Which, rank_line
from hydroslurm.core.files import clean

if TYPE_CHECKING:
    from hydroslurm.jobs.control.overview import Found, Overview
    from hydroslurm.jobs.control.plain_job import PlainAttempt, PlainJob
    from hydroslurm.jobs.spec.replicas import ReplicaSpec
    from hydroslurm.jobs.supervisor.attempts import Attempt

_MOST = 2000
"""Characters of a line."""
_MANY = 8
"""So many names and attempts of a job with a spec are listed; more are counted."""
_MANY_PLAIN = 16
"""The same of ranks and attempts of a job without one."""


def describe(which: Which) -> None:
    """Show a job: what was asked for, what became of it and when, and where to look."""
    from hydroslurm.jobs.control.plain_job import PlainJob, job_of
    from hydroslurm.slurm.client import open_client

    found = job_of(open_client(), which)
    lines = plain_job_lines(found) if isinstance(found, PlainJob) else training_job_lines(found)
    for line in lines:
        typer.echo(clean(line, most=_MOST))


def list_jobs() -> None:
    """List my jobs of hydroslurm: id, state, replicas, restarts, and since when. Without a spec the
    replicas are the ranks that have announced themselves."""
    import getpass

    from hydroslurm.jobs.control.plain_job import my_jobs
    from hydroslurm.slurm.client import open_client

    rows = [_row(one) for one in my_jobs(open_client(), getpass.getuser())]
    if not rows:
        typer.echo("no jobs of hydroslurm's; submit one: hydroslurm submit job.yaml, or train.py")
        return
    header = ("JOB", "NAME", "CONDITION", "SLURM", "REPLICAS", "RESTARTS", "PREEMPTIONS", "SINCE")
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]
    for row in [header, *rows]:
        line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
        typer.echo(clean(line.rstrip(), most=_MOST))


def _row(found: Overview | PlainJob) -> tuple[str, ...]:
    from hydroslurm.jobs.control.overview import Overview

    assert found.slurm is not None
    condition = found.condition
    if isinstance(found, Overview):
        name, replicas = found.job.name, str(found.job.replicas)
        preemptions = str(found.preemptions)
        restarts = f"{found.restarts}/{found.job.run_policy.backoff_limit}"
    else:
        name, replicas = found.name, str(len(found.ranks) or "-")
        restarts = str(found.slurm.restart_count)
        # accounting, which knows those that no rank has heard of, is asked by describe only
        preemptions = str(found.preemptions) if found.saver or restarts == "0" else "-"
    return (
        str(found.slurm.job_id),
        name[:30],
        condition.type if condition else "-",
        found.slurm.state.value,
        replicas,
        restarts,
        preemptions,
        moment(condition.epoch_ns) if condition else "-",
    )


def training_job_lines(found: Overview) -> list[str]:
    from hydroslurm.jobs.supervisor.attempts import ActiveTime

    job, policy = found.job, found.job.run_policy
    lines = of_slurm(found, job.name)
    lines += [f"Label:        {clean(f'{key}={text}')}" for key, text in job.labels.items()]
    lines += _replica_lines(found)
    lines.append(f"Restarts:     {found.restarts} of backoffLimit {policy.backoff_limit}")
    most = (
        "" if policy.preemption_limit is None else f" of preemptionLimit {policy.preemption_limit}"
    )
    lines.append(f"Preemptions:  {found.preemptions}{most}, mode {job.preemption.mode}")
    if policy.active_deadline_seconds is not None:
        active_s = ActiveTime(found.run.active_json).seconds
        lines.append(
            f"Active:       {active_s:.0f} s of activeDeadlineSeconds "
            f"{policy.active_deadline_seconds}"
        )
    lines += _tensorboard_lines(found)
    left_out = len(found.attempts) - _MANY
    more = f"; {left_out} before these" if left_out > 0 else ""
    lines.append(f"Attempts:     starts of the ranks, counted over restarts and requeues{more}")
    lines += [f"  {_attempt_line(one)}" for one in found.attempts[-_MANY:]] or ["  none yet"]
    lines += condition_lines(found)
    return [line.rstrip() for line in lines]


def _replica_lines(found: Overview) -> list[str]:
    from hydroslurm.jobs.control.overview import replica_states

    states = replica_states(found)
    lines = []
    for spec in found.job.replica_specs:
        lines.append(
            f"Replicas:     {spec.replicas} {spec.type}, restartPolicy {spec.restart_policy}"
        )
        lines.append(f"  Command:    {_command(found, spec)}")
        names = ", ".join(one.name for one in spec.template.env)
        if names:
            lines.append(f"  Variables:  {names} (values are not shown)")
        own = {name: words for name, words in states.items() if name.startswith(f"{spec.type}-")}
        for words in dict.fromkeys(own.values()):
            alike = [name for name, state in own.items() if state == words]
            listed = ", ".join(alike[:_MANY]) + (", ..." if len(alike) > _MANY else "")
            lines.append(f"  {f'{len(alike)}:':<12}{listed} {words}")
    return lines


def _command(found: Overview, spec: ReplicaSpec) -> str:
    if not found.job.run_mode.debug.enable:
        return clean(" ".join((*spec.template.command, *spec.template.args)))
    tasks = found.plan.tasks if found.plan is not None else ()
    words = next((task.argv for task in tasks if task.type == spec.type), ())
    return f"{clean(' '.join(words))} (debug mode: hydroslurm attach gives a shell)"


def _tensorboard_lines(found: Overview) -> list[str]:
    if found.job.tensorboard is None:
        return []
    if found.is_over:
        return ["TensorBoard:  ended with the job"]
    if found.tensorboard is None:
        return [f"TensorBoard:  does not answer now; see {found.run.tensorboard_log}"]
    lines = [f"TensorBoard:  {found.tensorboard.url} on {found.tensorboard.node}"]
    if found.tensorboard.tunnel is not None:
        lines.append(f"              from elsewhere: {found.tensorboard.tunnel}")
    return lines


def _attempt_line(one: Attempt) -> str:
    from hydroslurm.jobs.supervisor.exit_policy import format_status

    until = "" if one.ended_epoch_ns is None else f" to {moment(one.ended_epoch_ns)}"
    how = "no end is written down" if one.ending is None else one.ending.value
    who = "" if one.replica is None or one.status is None else f" by {one.replica}"
    status = "" if not one.status else f", status {format_status(one.status)}"
    return f"{one.number}  {moment(one.began_epoch_ns)}{until}: {how}{who}{status}"


def plain_job_lines(found: PlainJob) -> list[str]:
    """The lines about it."""
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
    lines += [f"  {rank_line(one, now_epoch_ns=now_ns)}" for one in found.ranks[:_MANY_PLAIN]]
    lines += (
        [f"  ... {len(found.ranks) - _MANY_PLAIN} more"] if len(found.ranks) > _MANY_PLAIN else []
    )
    left_out = len(found.attempts) - _MANY_PLAIN
    more = f"; {left_out} before these" if left_out > 0 else ""
    lines.append(f"Attempts:     starts of the ranks, counted over restarts and requeues{more}")
    lines += [f"  {_plain_attempt_line(one)}" for one in found.attempts[-_MANY_PLAIN:]] or [
        "  none yet"
    ]
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


def _plain_attempt_line(one: PlainAttempt) -> str:
    began = "" if one.began_epoch_s is None else f"{moment(int(one.began_epoch_s * 1e9))}"
    ended = "" if one.ended_epoch_s is None else f" to {moment(int(one.ended_epoch_s * 1e9))}"
    step = "" if one.step is None else f", at step {one.step}"
    return f"{one.number}  {began}{ended}: {clean(one.message)}{step}"
