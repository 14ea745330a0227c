"""``hydroslurm describe | list | cancel | logs | attach``: jobs of hydroslurm, with a spec or
without."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.core.files import clean

if TYPE_CHECKING:
    from hydroslurm.jobs.control.overview import Overview
    from hydroslurm.jobs.control.plain_job import PlainJob
    from hydroslurm.jobs.spec.replicas import ReplicaSpec
    from hydroslurm.jobs.supervisor.attempts import Attempt

Which = Annotated[str, typer.Argument(metavar="JOB", help="A job id, or a run folder.")]
Replica = Annotated[
    str | None,
    typer.Option(help="Such as worker-2, without a spec rank-2; default: the master, or rank-0."),
]

ASK_EVERY_S = 10.0
"""How often Slurm is asked whether a job has ended: sites do not like more."""
_MOST = 2000
"""Characters of a line."""
_MANY = 8
"""So many names and attempts are listed; more are counted."""


def describe(which: Which) -> None:
    """Show a job: what was asked for, what became of it and when, and where to look."""
    from hydroslurm.cli.plainjob import description
    from hydroslurm.jobs.control.plain_job import PlainJob, job_of
    from hydroslurm.slurm.client import open_client

    found = job_of(open_client(), which)
    for line in description(found) if isinstance(found, PlainJob) else _description(found):
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


def cancel(which: Which) -> None:
    """End a job for good. Ranks that can save do so; it is not started again."""
    from hydroslurm.errors import NotPermitted, WrongJobState
    from hydroslurm.jobs.control.plain_job import job_of
    from hydroslurm.slurm.client import open_client

    client = open_client()
    found = job_of(client, which)
    if found.slurm is None:
        raise WrongJobState(f"Slurm does not know the job of {found.run.root} (any more)")
    job_id = found.slurm.job_id
    if found.slurm.state.has_ended:
        typer.echo(f"job {job_id} has ended already: {found.slurm.state.value}")
        return
    # a rank that takes the signal for a preemption would ask for a requeue, and get it
    with contextlib.suppress(NotPermitted, WrongJobState):
        client.set_requeue(job_id, allowed=False)
    client.cancel(job_id)
    typer.echo(f"job {job_id} is cancelled; hydroslurm describe {job_id} says how it ends")


def logs(
    which: Which,
    replica: Replica = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended, over requeues.")
    ] = False,
    tail: Annotated[
        int, typer.Option(min=0, help="Only the last N lines of what is there; 0: all.")
    ] = 0,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="What the supervisor says instead.")
    ] = False,
) -> None:
    """Print what a replica, or a job without a spec, has printed, all its attempts in one."""
    from hydroslurm.errors import UsageError
    from hydroslurm.jobs.control.logs import follow_files, output_logs, supervisor_logs, task_logs
    from hydroslurm.jobs.control.plain_job import PlainJob, job_of
    from hydroslurm.slurm.client import open_client

    found = job_of(open_client(), which)
    if not isinstance(found, PlainJob):
        files = supervisor_logs(found) if supervisor else task_logs(found, replica)
    elif supervisor:
        raise UsageError("only a job with a spec has a supervisor; leave --supervisor out")
    else:
        files = output_logs(found, replica)
    with contextlib.suppress(KeyboardInterrupt):
        for text in follow_files(files, tail=tail, until=_Ended(found) if follow else None):
            typer.echo(text, nl=False)


def attach(
    which: Which,
    command: Annotated[
        list[str] | None, typer.Argument(help="Default: your shell. After --, if it has options.")
    ] = None,
    replica: Replica = None,
) -> None:
    """Get a shell, or run a command, where a replica runs: on its node, with its environment."""
    from hydroslurm.jobs.control.attach import attach_command
    from hydroslurm.jobs.control.plain_job import job_of
    from hydroslurm.slurm.client import open_client

    words = attach_command(
        job_of(open_client(), which),
        replica=replica,
        command=command or (),
        environ=os.environ,
        has_terminal=os.isatty(0) and os.isatty(1),
    )
    os.execvp(words[0], words)


class _Ended:
    """Whether a job is over: the run folder tells at once, Slurm where nobody can write there."""

    def __init__(self, found: Overview | PlainJob) -> None:
        self._found = found
        self._asked_s = time.monotonic()

    def __call__(self) -> bool:
        from hydroslurm.errors import HydroslurmError, NoSuchJob
        from hydroslurm.jobs.control.overview import Overview
        from hydroslurm.jobs.control.plain_job import job_of
        from hydroslurm.jobs.supervisor.conditions import final_condition, read_conditions
        from hydroslurm.slurm.client import open_client

        if self._found.is_over or final_condition(
            read_conditions(self._found.run.conditions_jsonl)
        ):
            return True
        if time.monotonic() - self._asked_s > ASK_EVERY_S:
            slurm = None if isinstance(self._found, Overview) else self._found.slurm
            which = str(self._found.run.root if slurm is None else slurm.job_id)
            try:
                self._found = job_of(open_client(), which)
            except NoSuchJob:  # it has ended, and is forgotten
                return True
            except HydroslurmError:
                pass
            self._asked_s = time.monotonic()
        return self._found.is_over


def _row(found: Overview | PlainJob) -> tuple[str, ...]:
    from hydroslurm.cli.plainjob import moment
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


def _description(found: Overview) -> list[str]:
    from hydroslurm.cli.plainjob import condition_lines, of_slurm
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
    from hydroslurm.cli.plainjob import moment
    from hydroslurm.jobs.supervisor.exit_policy import format_status

    until = "" if one.ended_epoch_ns is None else f" to {moment(one.ended_epoch_ns)}"
    how = "no end is written down" if one.ending is None else one.ending.value
    who = "" if one.replica is None or one.status is None else f" by {one.replica}"
    status = "" if not one.status else f", status {format_status(one.status)}"
    return f"{one.number}  {moment(one.began_epoch_ns)}{until}: {how}{who}{status}"
