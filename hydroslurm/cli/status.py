"""``hydroslurm status``: a job in Slurm, and its ranks' reports."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.elastic import member_lines, size_line
from hydroslurm.cli.shared import AsJsonLines, echo
from hydroslurm.core.files import moment

if TYPE_CHECKING:
    from hydroslurm.core.status import RankStatus
    from hydroslurm.observe.job import JobView
    from hydroslurm.observe.training import Training


def status(
    job_id: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="A job, an array or an element of one: 12, 12_3. Default: all of mine.",
        ),
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Show a job's state in Slurm and what its ranks report."""
    from hydroslurm.core.jobid import JobId
    from hydroslurm.core.trust import user_name
    from hydroslurm.observe import table
    from hydroslurm.observe.find import find_jobs
    from hydroslurm.observe.job import JobView
    from hydroslurm.observe.training import ranks_dir_of
    from hydroslurm.slurm.client import open_client

    client = open_client()
    if job_id is None:
        jobs = client.jobs(user=user_name())
    else:
        jobs = find_jobs(client, JobId.parse(job_id))
    for job in jobs:
        view = JobView(ranks_dir_of(job), job)
        if as_json:
            typer.echo(json.dumps(table.as_json(table.STATUS, view)))
        else:
            _print_status(view)
    if not jobs:
        typer.echo("no jobs")


def _print_status(view: JobView) -> None:
    from hydroslurm.slurm.text import format_duration

    job, condition = view.job, view.condition
    members, silent = _member_lines(view), tuple(view.silent)
    where = f"on {job.node_list}" if job.node_list else f"({job.reason})"
    limit = f"time limit {format_duration(job.time_limit_s)}"
    echo(
        f"job {job.id} {job.name}: {job.state.value} {where}, partition {job.partition}, "
        f"{limit}, restarts {job.restart_count}"
    )
    if condition is not None:
        message = f": {condition.message}" if condition.message else ""
        since = moment(condition.epoch_ns)
        echo(f"  {condition.type} {condition.reason} since {since}{message}")
    for line in members:
        echo(f"  {line}")
    if view.problem is not None and not members:
        echo(f"  its run folder cannot be read: {view.problem}")
    elif not members and not view.ranks and not silent:
        echo(f"  no rank has announced itself in {view.run.events}")
    for training in view.trainings:
        for rank in view.ranks_of(training):
            line = rank_line(rank, now_epoch_ns=time.time_ns())
            echo(f"  {_prefix(view, training)}{line}")
    for line in training_lines(view):
        echo(f"  {line}")
    for number, why in silent:
        echo(f"  rank {number}: {why}")


def training_lines(view: JobView) -> list[str]:
    """Return lines on how each training's time was spent, and which ranks the others wait for."""
    from hydroslurm.observe.training import slow_ranks

    lines = []
    for training in view.trainings:
        ranks = view.ranks_of(training)
        own = [goodput.message for rank in ranks if (goodput := rank.goodput())]
        own += [rank.message for rank in slow_ranks(ranks)]
        lines += [f"{_prefix(view, training)}{line}" for line in own if line]
    return lines


def _prefix(view: JobView, training: Training) -> str:
    return f"{training.run.root.name}: " if len(view.trainings) > 1 else ""


def _member_lines(view: JobView) -> list[str]:
    """Return lines of an elastic run or one of its members; none for other jobs."""
    from hydroslurm.observe.training import member_of

    if (member := member_of(view.job)) is not None:
        return member_lines(*member)
    size = size_line(view.run) if view.problem is None else None
    return [] if size is None else [size]


def rank_line(rank: RankStatus, *, now_epoch_ns: int) -> str:
    """Return one line about a rank, from its own report."""
    since = _since(rank.since.epoch_ns, now_epoch_ns)
    causes = f" for {', '.join(rank.causes)}" if rank.causes else ""
    parts = [f"rank {rank.rank} {rank.host}:{rank.pid}  {rank.message}{causes} {since}"]
    if rank.vacated_message:
        parts.append(rank.vacated_message)
    if rank.step is not None:
        parts.append(f"step {rank.step}")
    if rank.committed_step is not None:
        parts.append(f"saved to step {rank.committed_step}")
    if rank.not_copied is not None:
        parts.append(f"saves hold the training up: {rank.not_copied}")
    if rank.park_us is not None:
        pauses = "1 pause" if rank.pauses == 1 else f"{rank.pauses} pauses"
        parts.append(f"{pauses}, last parked in {rank.park_us:.0f} us")
    return ", ".join(parts)


def _since(epoch_ns: int, now_epoch_ns: int) -> str:
    """Format as ``since 3.2 s``; another host's clock may be ahead."""
    since_s = (now_epoch_ns - epoch_ns) / 1e9
    if since_s < -1.0:
        return f"since {-since_s:,.0f} s in the future by this host's clock"
    return f"since {max(0.0, since_s):.1f} s"
