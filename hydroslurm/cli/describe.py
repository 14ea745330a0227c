"""``hydroslurm describe | list``: what jobs should do, and what became of them."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import typer

from hydroslurm.cli.elastic import elastic_lines, member_lines
from hydroslurm.cli.shared import AsJsonLines, Which, echo
from hydroslurm.cli.status import rank_line, training_lines
from hydroslurm.core.files import clean, moment

if TYPE_CHECKING:
    from hydroslurm.jobs.spec.replicas import ReplicaSpec
    from hydroslurm.jobs.supervisor.attempts import Attempt
    from hydroslurm.observe.history import PlainAttempt
    from hydroslurm.observe.job import JobView
    from hydroslurm.slurm.values import Job

_MANY = 8
"""How many names and attempts of a job with a spec are listed; the rest is counted."""
_MANY_PLAIN = 16
"""The same for ranks and attempts of a job without a spec."""
_LINE_CELLS = 2000
"""Enough for every column of ``list``."""


def describe(which: Which) -> None:
    """Show what was asked for, what became of it, and where its files are."""
    from hydroslurm.observe.find import view_of
    from hydroslurm.slurm.client import open_client

    view = view_of(open_client(), which)
    lines = training_job_lines(view) if view.has_spec else plain_job_lines(view)
    for line in lines:
        echo(line)


def list_jobs(as_json: AsJsonLines = False) -> None:
    """List my hydroslurm jobs.

    Id, state, replicas, restarts, and since when. Without a spec the replicas are the ranks that
    have announced themselves.
    """
    from hydroslurm.core.trust import user_name
    from hydroslurm.observe import table
    from hydroslurm.observe.find import my_jobs
    from hydroslurm.slurm.client import open_client

    views = my_jobs(open_client(), user_name())
    if as_json:
        for view in views:
            typer.echo(json.dumps(table.as_json(table.LIST, view)))
        return
    if not views:
        typer.echo("no hydroslurm jobs; submit one: hydroslurm submit job.yaml, or train.py")
        return
    head, lines = table.layout(table.LIST, views, _LINE_CELLS)
    for line in (head, *lines):
        echo(line)


def training_job_lines(view: JobView) -> list[str]:
    from hydroslurm.jobs.supervisor.attempts import ActiveTime

    job, policy = view.spec, view.spec.run_policy
    lines = of_slurm(view, job.name)
    lines += [f"Label:        {clean(f'{key}={text}')}" for key, text in job.labels.items()]
    if job.elastic is not None:
        lines.append(f"Command:      {_command(view, job.replica_specs[0])}")
        lines += [*elastic_lines(view.run, view.slurm), *condition_lines(view)]
        return [line.rstrip() for line in lines]
    lines += _replica_lines(view)
    lines.append(f"Restarts:     {view.restarts} of backoffLimit {policy.backoff_limit}")
    most = (
        "" if policy.preemption_limit is None else f" of preemptionLimit {policy.preemption_limit}"
    )
    lines.append(f"Preemptions:  {view.preemptions}{most}, mode {job.preemption.mode}")
    if policy.active_deadline_seconds is not None:
        active_s = ActiveTime(view.run.active_json).seconds
        lines.append(
            f"Active:       {active_s:.0f} s of activeDeadlineSeconds "
            f"{policy.active_deadline_seconds}"
        )
    lines += [f"Training:     {line}" for line in training_lines(view)]
    lines += _tensorboard_lines(view)
    lines += _attempt_lines([_attempt_line(a) for a in view.attempts], _MANY)
    lines += condition_lines(view)
    return [line.rstrip() for line in lines]


def _replica_lines(view: JobView) -> list[str]:
    states = _replica_states(view)
    lines = []
    for spec in view.spec.replica_specs:
        lines.append(
            f"Replicas:     {spec.replicas} {spec.type}, restartPolicy {spec.restart_policy}"
        )
        lines.append(f"  Command:    {_command(view, spec)}")
        names = ", ".join(variable.name for variable in spec.template.env)
        if names:
            lines.append(f"  Variables:  {names} (values are not shown)")
        own = {name: state for name, state in states.items() if name.startswith(f"{spec.type}-")}
        for state in dict.fromkeys(own.values()):
            alike = [name for name in own if own[name] == state]
            listed = ", ".join(alike[:_MANY]) + (", ..." if len(alike) > _MANY else "")
            lines.append(f"  {f'{len(alike)}:':<12}{listed} {state}")
    return lines


def _replica_states(view: JobView) -> dict[str, str]:
    """Replica -> its state in the latest attempt: ``running``, ``ended with status 137 (SIGKILL)``
    and the like, in the order of ranks."""
    from hydroslurm.jobs.supervisor.exit_policy import format_status
    from hydroslurm.jobs.supervisor.job_step import TaskExits

    plan = view.plan
    if plan is None:
        return {}
    if not view.attempts:
        return dict.fromkeys(plan.replicas, "not started yet")
    attempt = view.attempts[-1]
    otherwise = _unended(view.slurm)
    if attempt.ending is not None:
        otherwise = f"ended with attempt {attempt.number} ({attempt.ending.value})"
    ends = TaskExits(view.run.srun_log(attempt.number))
    ends.look()
    states = dict.fromkeys(plan.replicas, otherwise)
    for name in states:
        own = [ends.statuses.get(n) for n, task in enumerate(plan.tasks) if task.replica == name]
        ended = [status for status in own if status is not None]
        if len(ended) == len(own):
            states[name] = f"ended with status {format_status(max(ended))}"
    return states


def _unended(slurm: Job | None) -> str:
    """State of an attempt whose end nobody has written down."""
    from hydroslurm.slurm.values import JobState

    if slurm is None or slurm.state is JobState.RUNNING:
        return "running"
    if slurm.state is JobState.SUSPENDED:
        return "suspended"
    return "ended with the job" if slurm.state.has_ended else "interrupted"


def _command(view: JobView, spec: ReplicaSpec) -> str:
    if not view.spec.run_mode.debug.enable:
        return clean(" ".join((*spec.template.command, *spec.template.args)))
    tasks = view.plan.tasks if view.plan is not None else ()
    argv = next((task.argv for task in tasks if task.replica == f"{spec.type}-0"), ())
    return f"{clean(' '.join(argv))} (debug mode: hydroslurm attach gives a shell)"


def _tensorboard_lines(view: JobView) -> list[str]:
    from hydroslurm.jobs.supervisor.tensorboard import read_address

    if view.spec.tensorboard is None:
        return []
    if view.is_over:
        return ["TensorBoard:  ended with the job"]
    address = read_address(view.run.tensorboard_json)
    if address is None:
        return [f"TensorBoard:  does not answer now; see {view.run.tensorboard_log}"]
    lines = [f"TensorBoard:  {address.url} on {address.node}"]
    if address.tunnel is not None:
        lines.append(f"              from elsewhere: {address.tunnel}")
    return lines


def _attempt_lines(attempts: list[str], most: int) -> list[str]:
    more = f"; {len(attempts) - most} before these" if len(attempts) > most else ""
    header = f"Attempts:     starts of the ranks, counted over restarts and requeues{more}"
    return [header, *(f"  {line}" for line in attempts[-most:] or ["none yet"])]


def _attempt_line(attempt: Attempt) -> str:
    from hydroslurm.jobs.supervisor.exit_policy import format_status

    until = "" if attempt.ended_epoch_ns is None else f" to {moment(attempt.ended_epoch_ns)}"
    how = "no end was recorded" if attempt.ending is None else attempt.ending.value
    decision = attempt.decision
    replica, failed = (None, None) if decision is None else (decision.replica, decision.status)
    who = "" if replica is None or failed is None else f" by {replica}"
    status = "" if not failed else f", status {format_status(failed)}"
    return f"{attempt.number}  {moment(attempt.began_epoch_ns)}{until}: {how}{who}{status}"


def plain_job_lines(view: JobView) -> list[str]:
    """Return describe's lines for a job without a spec."""
    from hydroslurm.observe.training import member_of

    slurm = view.slurm
    lines = of_slurm(view, view.name)
    if view.run.elastic.is_dir():  # its members were started by hand
        return [*lines, *elastic_lines(view.run, view.slurm)]
    if slurm is not None and (member := member_of(slurm)) is not None:
        return [*lines, *member_lines(*member), *_rank_lines(view)]
    if view.submission is not None:
        lines.append(f"Command:      {clean(view.submission.command)}")
    files = dict.fromkeys(filter(None, (slurm.std_out, slurm.std_err))) if slurm else ()
    lines += [f"Output:       {file}" for file in files]
    lines.append(f"At a stop:    {_saver(view)}")
    first = view.first
    if first is not None and first.committed is not None:
        when = moment(first.committed.epoch_ns)
        lines.append(f"Checkpoint:   step {first.committed_step}, committed {when}")
    if slurm is not None:
        lines.append(f"Restarts:     {slurm.restart_count}")
    lines.append(f"Preemptions:  {view.preemptions}")
    lines += _rank_lines(view) or ["Ranks:        none has announced itself"]
    lines += _attempt_lines([_plain_attempt_line(a) for a in view.plain_attempts], _MANY_PLAIN)
    lines += condition_lines(view)
    return [line.rstrip() for line in lines]


def _rank_lines(view: JobView) -> list[str]:
    now_ns = time.time_ns()
    ranks = view.ranks
    lines = [f"Ranks:        {len(ranks)}"] if ranks else []
    lines += [f"  {rank_line(rank, now_epoch_ns=now_ns)}" for rank in ranks[:_MANY_PLAIN]]
    if len(ranks) > _MANY_PLAIN:
        lines.append(f"  ... {len(ranks) - _MANY_PLAIN} more")
    return [*lines, *(f"  {line}" for line in training_lines(view))]


def of_slurm(view: JobView, name: str) -> list[str]:
    """Return lines with Slurm's facts about a job, and its run folder."""
    slurm = view.slurm
    lines = [f"Name:         {name}"]
    if slurm is None:
        lines.append("Slurm:        does not know it, or cannot be asked")
    else:
        waits = f" ({slurm.reason})" if slurm.reason not in ("", "None") else ""
        where = f" on {slurm.node_list}" if slurm.node_list else waits
        lines.append(f"Slurm:        job {slurm.id}, {slurm.state.value}{where}")
        lines.append(f"Partition:    {slurm.partition}{f', QOS {slurm.qos}' if slurm.qos else ''}")
    return [*lines, f"Run folder:   {view.run.root}"]


def condition_lines(view: JobView) -> list[str]:
    """Return lines with a job's history."""
    lines = ["Conditions:"]
    for condition in view.conditions:
        reason = f" {condition.reason}" if condition.reason else ""
        message = f": {clean(condition.message)}" if condition.message else ""
        lines.append(f"  {moment(condition.epoch_ns)}  {condition.type}{reason}{message}")
    return lines if view.conditions else [*lines, "  none"]


def _saver(view: JobView) -> str:
    if view.saver == "attempt_began":
        return "its hydroslurm.Run saves"
    if view.saver == "stops_taken":
        return "the script saves in its own way (receive_suspend_command)"
    yet = "" if view.is_over else ", so far"
    return (
        f"nobody saves: no rank has made a hydroslurm.Run, or called receive_suspend_command(){yet}"
    )


def _plain_attempt_line(a: PlainAttempt) -> str:
    began = "" if a.began_epoch_s is None else f"{moment(int(a.began_epoch_s * 1e9))}"
    ended = "" if a.ended_epoch_s is None else f" to {moment(int(a.ended_epoch_s * 1e9))}"
    step = "" if a.step is None else f", at step {a.step}"
    return f"{a.number}  {began}{ended}: {clean(a.message)}{step}"
