"""``hydroslurm pause | resume | requeue | cancel | logs | attach``: jobs that run."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.status import echo

if TYPE_CHECKING:
    from hydroslurm.core.ack import Answer
    from hydroslurm.jobs.control.overview import Overview
    from hydroslurm.jobs.control.plain_job import PlainJob
    from hydroslurm.jobs.control.requests import JobAnswer
    from hydroslurm.slurm.client import Job as SlurmJob
    from hydroslurm.slurm.client import SlurmClient

Pid = Annotated[int | None, typer.Option("--pid", help="A process of this machine.")]
Job = Annotated[
    str | None,
    typer.Option("--job", help="A Slurm job, with all its ranks: 12, or 12_3 of an array."),
]
AllElements = Annotated[
    bool, typer.Option("--all-elements", help="Of an array that is given by its number.")
]
Timeout = Annotated[
    float, typer.Option("--timeout", help="How long to wait for the answer, seconds.")
]
Which = Annotated[
    str, typer.Argument(metavar="JOB", help="A job id (12, or 12_3 of an array), or a run folder.")
]
Replica = Annotated[
    str | None,
    typer.Option(help="Such as worker-2; without a spec rank-2. Default: the master, or rank-0."),
]

ASK_EVERY_S = 10.0
"""How often Slurm is asked whether a job has ended: sites dislike more."""


def pause(
    pid: Pid = None,
    job: Job = None,
    all_elements: AllElements = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            "--timeout",
            help="How long to wait for the answer, seconds. Default: 10, with --vacate 120.",
        ),
    ] = None,
    vacate: Annotated[
        bool, typer.Option("--vacate", help="Move the device memory to the host as well.")
    ] = False,
) -> None:
    """Park a process or a job between two operators, wait for the acknowledgement, print the
    latency per rank."""
    from hydroslurm.jobs.control.requests import pause_job
    from hydroslurm.runtime import client

    if timeout_s is None:
        timeout_s = 120.0 if vacate else 10.0
    process_verb = functools.partial(client.pause, vacate=vacate, timeout_s=timeout_s)
    job_verb = functools.partial(pause_job, vacate=vacate, timeout_s=timeout_s)
    _ask(process_verb, job_verb, pid, job, all_elements=all_elements)


def resume(
    pid: Pid = None,
    job: Job = None,
    all_elements: AllElements = False,
    timeout_s: Timeout = 10.0,
) -> None:
    """Resume a paused process or job in place, and print how long that took per rank."""
    from hydroslurm.jobs.control.requests import resume_job
    from hydroslurm.runtime import client

    process_verb = functools.partial(client.resume, timeout_s=timeout_s)
    job_verb = functools.partial(resume_job, timeout_s=timeout_s)
    _ask(process_verb, job_verb, pid, job, all_elements=all_elements)


def requeue(
    job: Annotated[str, typer.Argument(help="The job: 12, or 12_3 of an array.")],
    all_elements: AllElements = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="How long to wait for the save, seconds.")
    ] = 60.0,
) -> None:
    """Make a job save and requeue; unlike scontrol requeue, this gives it time to save."""
    from hydroslurm.jobs.control.requests import requeue_job

    _for_each(job, functools.partial(requeue_job, timeout_s=timeout_s), all_elements=all_elements)


def cancel(which: Which, all_elements: AllElements = False) -> None:
    """End a job for good. Ranks that can save do so; it is not started again."""
    _for_each(which, _cancel, all_elements=all_elements)


def _cancel(client: SlurmClient, job: SlurmJob) -> None:
    from hydroslurm.errors import NotPermitted, WrongJobState
    from hydroslurm.jobs.control.plain_job import require_ours
    from hydroslurm.jobs.control.requests import ranks_dir_of

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
    """Print the output of a replica, or of a job without a spec, over all its attempts."""
    from hydroslurm.errors import UsageError
    from hydroslurm.jobs.control.logs import follow_files, output_logs, supervisor_logs, task_logs
    from hydroslurm.jobs.control.plain_job import PlainJob, job_of
    from hydroslurm.slurm.client import open_client

    found = job_of(open_client(), which)
    if not isinstance(found, PlainJob):
        files = supervisor_logs(found) if supervisor else task_logs(found, replica)
    elif supervisor:
        raise UsageError("only a job with a spec has a supervisor; omit --supervisor")
    else:
        files = output_logs(found, replica)
    with contextlib.suppress(KeyboardInterrupt):
        for text in follow_files(files, tail=tail, until=_Ended(found) if follow else None):
            typer.echo(text, nl=False)


def attach(
    which: Which,
    command: Annotated[
        list[str] | None, typer.Argument(help="Default: your shell. Put it after --.")
    ] = None,
    replica: Replica = None,
) -> None:
    """Get a shell, or run a command, where a replica runs: on its node, with its environment."""
    from hydroslurm.jobs.control.attach import attach_command
    from hydroslurm.jobs.control.plain_job import job_of
    from hydroslurm.slurm.client import open_client

    argv = attach_command(
        job_of(open_client(), which),
        replica=replica,
        command=command or (),
        environ=os.environ,
        has_terminal=os.isatty(0) and os.isatty(1),
    )
    os.execvp(argv[0], argv)


class _Ended:
    """Whether a job is over: the run folder tells at once, Slurm if nobody could write there."""

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
            which = str(self._found.run.root if slurm is None else slurm.id)
            try:
                self._found = job_of(open_client(), which)
            except NoSuchJob:  # it ended, and slurmctld has forgotten it
                return True
            except HydroslurmError:
                pass
            self._asked_s = time.monotonic()
        return self._found.is_over


def _ask(
    process_verb: Callable[[int], Answer],
    job_verb: Callable[[SlurmClient, SlurmJob], JobAnswer],
    pid: int | None,
    job: str | None,
    *,
    all_elements: bool,
) -> None:
    """Pause or resume a process or a job, whichever is given."""
    from hydroslurm.errors import UsageError

    if pid is not None and job is not None:
        raise UsageError("give either --pid or --job, not both")
    if job is not None:
        _for_each(job, job_verb, all_elements=all_elements)
        return
    if pid is None:
        raise UsageError("give --job JOBID, or --pid PID for a process of this machine")
    answer = process_verb(pid)
    echo(f"pid {pid} rank {answer.rank}: {answer.message}")
    if not answer.done:
        raise typer.Exit(1)


def _for_each(
    which: str, act: Callable[[SlurmClient, SlurmJob], JobAnswer | None], *, all_elements: bool
) -> None:
    """Act on the job of an id or a run folder; on several only by ``--all-elements``, and then on
    all that can be acted on. Exit status 1: something was not done."""
    from hydroslurm.core.jobid import JobId
    from hydroslurm.errors import HydroslurmError, WrongJobState
    from hydroslurm.jobs.control.overview import locate
    from hydroslurm.jobs.control.plain_job import require_ours
    from hydroslurm.jobs.control.requests import find_jobs
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
    """Whether all its ranks have done it."""
    echo(f"job {answer.job_id}: {answer.how}")
    for one in answer.answers:
        echo(f"  rank {one.rank}: {one.message}")
    for rank in answer.silent:
        echo(
            f"  rank {rank}: no answer in time; it has reached no operator or step yet (it is "
            "importing, or inside a long one), or it cannot write its events",
            err=True,
        )
    return not answer.silent and all(one.done for one in answer.answers)
