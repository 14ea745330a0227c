"""``hydroslurm pause | resume | requeue | cancel | logs | attach``: actions on existing jobs."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.shared import Which, echo

if TYPE_CHECKING:
    from hydroslurm.core.ack import Answer
    from hydroslurm.jobs.requests import JobAnswer
    from hydroslurm.slurm.client import Job as SlurmJob
    from hydroslurm.slurm.client import SlurmClient

Pid = Annotated[int | None, typer.Option("--pid", help="A process of this machine instead.")]
Job = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="A job id (12, or 12_3 of an array), or a run folder."),
]
JobOption = Annotated[str | None, typer.Option("--job", hidden=True)]
AllElements = Annotated[
    bool, typer.Option("--all-elements", help="Of an array that is given by its number.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", min=0, help="How long to wait for the answer, seconds.")
]
Replica = Annotated[
    str | None,
    typer.Option(help="Such as worker-2; without a spec rank-2. Default: the master, or rank-0."),
]


def pause(
    job: Job = None,
    pid: Pid = None,
    job_option: JobOption = None,
    all_elements: AllElements = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            min=0,
            help="How long to wait for the answer, seconds. Default: 10, with --vacate 120.",
        ),
    ] = None,
    vacate: Annotated[
        bool, typer.Option("--vacate", help="Move the device memory to the host as well.")
    ] = False,
) -> None:
    """Park a job, or a process, between two operators.

    Waits for the acknowledgement, and prints the latency per rank.
    """
    from hydroslurm.jobs.requests import pause_job
    from hydroslurm.runtime import client

    if timeout_s is None:
        timeout_s = 120.0 if vacate else 10.0
    how = {"all_elements": all_elements, "vacate": vacate}
    _act(pause_job, client.pause, job or job_option, pid, timeout_s=timeout_s, **how)


def resume(
    job: Job = None,
    pid: Pid = None,
    job_option: JobOption = None,
    all_elements: AllElements = False,
    timeout_s: Timeout = 10.0,
) -> None:
    """Resume a paused job or process in place."""
    from hydroslurm.jobs.requests import resume_job
    from hydroslurm.runtime import client

    job = job or job_option
    _act(resume_job, client.resume, job, pid, all_elements=all_elements, timeout_s=timeout_s)


def requeue(
    job: Which,
    all_elements: AllElements = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, help="How long to wait for the save, seconds.")
    ] = 60.0,
) -> None:
    """Make a job save and requeue.

    Unlike scontrol requeue, this gives it all the time that it needs to save.
    """
    from hydroslurm.jobs.requests import requeue_job

    _for_each(job, functools.partial(requeue_job, timeout_s=timeout_s), all_elements=all_elements)


def cancel(which: Which, all_elements: AllElements = False) -> None:
    """End a job for good.

    Ranks that can save do so; it is not started again.
    """
    _for_each(which, _cancel, all_elements=all_elements)


def _cancel(client: SlurmClient, job: SlurmJob) -> None:
    from hydroslurm.errors import NotPermitted, WrongJobState
    from hydroslurm.observe.find import require_ours
    from hydroslurm.observe.training import ranks_dir_of

    require_ours(client, ranks_dir_of(job), job, str(job.id))
    if job.state.has_ended:
        typer.echo(f"job {job.id} has ended already: {job.state.value}")
        return
    # a rank that takes the signal for a preemption would request a requeue, and get it
    with contextlib.suppress(NotPermitted, WrongJobState):
        client.set_requeue(job, allowed=False)
    client.cancel(job)
    typer.echo(f"job {job.id} is cancelled; hydroslurm describe {job.id} shows how it ends")


def logs(
    which: Which,
    replica: Replica = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow until the job has ended, over requeues.")
    ] = False,
    tail: Annotated[int, typer.Option(min=0, help="Start with the last N lines; 0: all.")] = 0,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="Print the supervisor's output instead.")
    ] = False,
) -> None:
    """Print a job's output over all its attempts."""
    from hydroslurm.errors import UsageError
    from hydroslurm.observe.find import view_of
    from hydroslurm.observe.logs import (
        Ended,
        follow_files,
        output_logs,
        supervisor_logs,
        task_logs,
    )
    from hydroslurm.slurm.client import open_client

    view = view_of(open_client(), which)
    if view.has_spec:
        files = supervisor_logs(view) if supervisor else task_logs(view, replica)
    elif supervisor:
        raise UsageError("only a job with a spec has a supervisor; omit --supervisor")
    else:
        files = output_logs(view, replica)
    with contextlib.suppress(KeyboardInterrupt):
        for text in follow_files(files, tail=tail, until=Ended(view) if follow else None):
            typer.echo(text, nl=False)


def attach(
    which: Which,
    command: Annotated[
        list[str] | None, typer.Argument(help="Default: your shell. Put it after --.")
    ] = None,
    replica: Replica = None,
) -> None:
    """Get a shell, or run a command, where a job runs.

    On the node of the replica, with its environment.
    """
    from hydroslurm.observe.attach import attach_command
    from hydroslurm.observe.find import view_of
    from hydroslurm.slurm.client import open_client

    argv = attach_command(
        view_of(open_client(), which),
        replica=replica,
        command=command or (),
        environ=os.environ,
        has_terminal=os.isatty(0) and os.isatty(1),
    )
    os.execvp(argv[0], argv)


def _act(
    on_job: Callable[..., JobAnswer],
    on_process: Callable[..., Answer],
    job: str | None,
    pid: int | None,
    *,
    all_elements: bool,
    timeout_s: float,
    **how: bool,
) -> None:
    """Send a request to a job, or to a local process, which may still be starting."""
    from hydroslurm.errors import UsageError
    from hydroslurm.runtime import client

    if (job is None) == (pid is None):
        what = "a job or --pid, not both" if job else "a job, such as 12, or --pid"
        raise UsageError(f"give {what}")
    if job is not None:
        act = functools.partial(on_job, timeout_s=timeout_s, **how)
        _for_each(job, act, all_elements=all_elements)
        return
    assert pid is not None
    if client.is_starting(pid):
        echo(f"process {pid} is still starting; waiting up to {timeout_s:g} s for it", err=True)
        client.wait_for_start(pid, timeout_s=timeout_s)
    answer = on_process(pid, timeout_s=timeout_s, **how)
    echo(f"pid {pid} rank {answer.rank}: {answer.message}")
    if not answer.done:
        raise typer.Exit(1)


def _for_each(
    which: str, act: Callable[[SlurmClient, SlurmJob], JobAnswer | None], *, all_elements: bool
) -> None:
    """Act on the job of an id or run folder; with ``--all-elements``, on all that can be acted on.
    Exit status 1: something was not done."""
    from hydroslurm.core.jobid import JobId
    from hydroslurm.errors import HydroslurmError, WrongJobState
    from hydroslurm.observe.find import find_jobs, locate, require_ours
    from hydroslurm.slurm.client import open_client

    client = open_client()
    if all_elements:
        jobs = find_jobs(client, JobId.parse(which))
    else:
        run, job = locate(client, which)
        if job is None:
            require_ours(client, run, None, which)
            raise WrongJobState(f"Slurm does not know the job of {run.root}, or has forgotten it")
        jobs = (job,)
    done = True
    for job in jobs:
        if all_elements and job.state.has_ended:
            typer.echo(f"job {job.id} has ended already: {job.state.value}")
            continue
        try:
            answer = act(client, job)
            done &= answer is None or _print_job(answer)
        except HydroslurmError as error:
            if not all_elements:
                raise
            echo(f"hydroslurm: {error}", err=True)
            done = False
    if not done:
        raise typer.Exit(1)


def _print_job(answer: JobAnswer) -> bool:
    """Print the answer; return whether all ranks have done it."""
    echo(f"job {answer.job_id}: {answer.how}")
    for reply in answer.answers:
        echo(f"  rank {reply.rank}: {reply.message}")
    for rank in answer.silent:
        echo(
            f"  rank {rank}: no answer in time; it has reached no operator or step yet (it is "
            "importing, or inside a long one), or it cannot write its events",
            err=True,
        )
    return not answer.silent and all(reply.done for reply in answer.answers)
