"""``hydroslurm pause | resume | requeue | status | cancel | logs | attach``: jobs that run."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hydroslurm.core.ack import Answer
    from hydroslurm.core.agentstate import AgentState
    from hydroslurm.core.status import RankStatus
    from hydroslurm.jobs.control.overview import Overview
    from hydroslurm.jobs.control.plain_job import PlainJob
    from hydroslurm.jobs.control.requests import JobAnswer, JobStatus

Pid = Annotated[int | None, typer.Option("--pid", help="A process of this machine.")]
JobId = Annotated[int | None, typer.Option("--job", help="A Slurm job, with all its ranks.")]
Timeout = Annotated[
    float, typer.Option("--timeout", help="How long to wait for the answer, seconds.")
]
Which = Annotated[str, typer.Argument(metavar="JOB", help="A job id, or a run folder.")]
Replica = Annotated[
    str | None,
    typer.Option(help="Such as worker-2, without a spec rank-2; default: the master, or rank-0."),
]

ASK_EVERY_S = 10.0
"""How often Slurm is asked whether a job has ended: sites do not like more."""


def pause(pid: Pid = None, job: JobId = None, timeout_s: Timeout = 10.0) -> None:
    """Park a process or a job between two operators, wait for the acknowledgement, print the
    latency per rank."""
    from hydroslurm.jobs.control.requests import pause_job
    from hydroslurm.runtime import client

    if pid is not None and _only(pid, job):
        _print_answer(f"pid {pid}", client.pause(pid, timeout_s=timeout_s))
        return
    from hydroslurm.slurm.client import open_client

    _print_job(pause_job(open_client(), _job(job), timeout_s=timeout_s))


def resume(pid: Pid = None, job: JobId = None, timeout_s: Timeout = 10.0) -> None:
    """Let a paused process or job go on where it was, and print how long that took per rank."""
    from hydroslurm.jobs.control.requests import resume_job
    from hydroslurm.runtime import client

    if pid is not None and _only(pid, job):
        _print_answer(f"pid {pid}", client.resume(pid, timeout_s=timeout_s))
        return
    from hydroslurm.slurm.client import open_client

    _print_job(resume_job(open_client(), _job(job), timeout_s=timeout_s))


def requeue(
    job_id: Annotated[int, typer.Argument(help="The job.")],
    timeout_s: Annotated[
        float, typer.Option("--timeout", help="How long to wait for the save, seconds.")
    ] = 60.0,
) -> None:
    """Have a job save and go back into the queue; unlike scontrol requeue it is given the time."""
    from hydroslurm.jobs.control.requests import requeue_job
    from hydroslurm.slurm.client import open_client

    _print_job(requeue_job(open_client(), job_id, timeout_s=timeout_s))


def status(
    job_id: Annotated[int | None, typer.Argument(help="One job; default: all of mine.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per job and line.")
    ] = False,
) -> None:
    """Show Slurm's state of a job beside what its ranks say of themselves."""
    import getpass

    from hydroslurm.jobs.control.requests import find_job, job_status
    from hydroslurm.slurm.client import open_client

    client = open_client()
    if job_id is None:
        jobs = list(client.jobs(user=getpass.getuser()))
    else:
        jobs = [find_job(client, job_id)]
    for found in (job_status(job) for job in jobs):
        if as_json:
            typer.echo(json.dumps(_as_json(found)))
        else:
            _print_status(found)
    if not jobs:
        typer.echo("no jobs")


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


def _say(line: str, *, err: bool = False) -> None:
    """Part of it was written by others."""
    from hydroslurm.core.files import clean

    typer.echo(clean(line, most=_MOST), err=err)


_MOST = 2000
"""Characters of a line."""


def _only(pid: int, job: int | None) -> bool:
    from hydroslurm.errors import UsageError

    if job is not None:
        raise UsageError("give either --pid or --job, not both")
    return pid is not None


def _job(job: int | None) -> int:
    from hydroslurm.errors import UsageError

    if job is None:
        raise UsageError("give --job JOBID, or --pid PID for a process of this machine")
    return job


def _print_answer(who: str, answer: Answer) -> None:
    _say(f"{who} rank {answer.rank}: {answer.message}")
    if not answer.done:
        raise typer.Exit(1)


def _print_job(answer: JobAnswer) -> None:
    _say(f"job {answer.job_id}: {answer.how}")
    for one in answer.answers:
        _say(f"  rank {one.rank}: {one.message}")
    for rank in answer.silent:
        _say(
            f"  rank {rank}: no answer in time; it has come to no operator or step yet (it "
            "imports, or is inside a long one), or it cannot write its events",
            err=True,
        )
    if answer.silent or not all(one.done for one in answer.answers):
        raise typer.Exit(1)


def _print_status(found: JobStatus) -> None:
    from hydroslurm.jobs.control.overview import condition_now
    from hydroslurm.slurm.text import compress_nodes, format_duration

    job = found.job
    where = f"on {compress_nodes(job.nodes)}" if job.nodes else f"({job.reason})"
    limit = f"time limit {format_duration(job.time_limit_s)}"
    _say(
        f"job {job.job_id} {job.name}: {job.state.value} {where}, partition {job.partition}, "
        f"{limit}, restarts {job.restart_count}"
    )
    condition = condition_now(found.run_dir, job, next(iter(found.ranks), None))
    if condition is not None:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(condition.epoch_ns / 1e9))
        message = f": {condition.message}" if condition.message else ""
        _say(f"  {condition.type} {condition.reason} since {since}{message}")
    if found.problem is not None:
        _say(f"  its run folder cannot be looked at: {found.problem}")
    elif not found.ranks and not found.silent:
        _say(f"  no rank has announced itself in {found.run_dir.events}")
    for node in found.nodes:
        _say(f"  {_node_line(node, now_epoch_ns=time.time_ns())}")
    for rank in found.ranks:
        _say(f"  {rank_line(rank, now_epoch_ns=time.time_ns())}")
    for number, why in found.silent:
        _say(f"  rank {number}: {why}")


def _node_line(node: AgentState, *, now_epoch_ns: int) -> str:
    since = _since(node.since_epoch_ns, now_epoch_ns)
    counts = ", ".join(f"{count} {state}" for state, count in node.counts)
    causes = f" for {', '.join(node.held_for)}" if node.held_for else ""
    words = [f"node {node.node} {node.host}:{node.pid}  {node.state}{causes} {since}"]
    words.append(f"{node.workers} rank{'' if node.workers == 1 else 's'}")
    if node.state == "mixed":
        words.append(counts)
    if node.asked is not None and not node.answered:
        words.append(f"asked for {node.asked}, and not all ranks have answered")
    if node.status is not None:
        words.append(f"status {node.status}")
    return ", ".join(words)


def rank_line(rank: RankStatus, *, now_epoch_ns: int) -> str:
    """Where a rank is, as it says itself."""
    since = _since(rank.since.epoch_ns, now_epoch_ns)
    causes = f" for {', '.join(rank.causes)}" if rank.causes else ""
    words = [f"rank {rank.rank} {rank.host}:{rank.pid}  {rank.message}{causes} {since}"]
    if rank.children_message:
        words.append(rank.children_message)
    if rank.step is not None:
        words.append(f"step {rank.step}")
    if rank.committed_step is not None:
        words.append(f"saved to step {rank.committed_step}")
    if rank.not_copied is not None:
        words.append(f"saves hold the training up: {rank.not_copied}")
    if rank.park_us is not None:
        pauses = "1 pause" if rank.pauses == 1 else f"{rank.pauses} pauses"
        words.append(f"{pauses}, last parked in {rank.park_us:.0f} us")
    return ", ".join(words)


def _since(epoch_ns: int, now_epoch_ns: int) -> str:
    """``since 3.2 s``; another host may have a date that is ahead."""
    since_s = (now_epoch_ns - epoch_ns) / 1e9
    if since_s < -1.0:
        return f"since a moment that is {-since_s:,.0f} s ahead of this host's date"
    return f"since {max(0.0, since_s):.1f} s"


def _as_json(found: JobStatus) -> dict[str, object]:
    from hydroslurm.jobs.control.overview import condition_now

    job = found.job
    condition = condition_now(found.run_dir, job, next(iter(found.ranks), None))
    return {
        "job_id": job.job_id,
        "name": job.name,
        "slurm_state": job.state.value,
        "partition": job.partition,
        "nodes": list(job.nodes),
        "restart_count": job.restart_count,
        "run_dir": str(found.run_dir.root),
        "problem": found.problem,
        "condition": None if condition is None else vars(condition),
        "agents": [vars(node) for node in found.nodes],
        "ranks": [_rank_as_json(rank) for rank in found.ranks],
        "silent": dict(found.silent),
    }


_RANK_FIELDS = (
    "rank",
    "state",
    "causes",
    "step",
    "pid",
    "host",
    "restart_count",
    "pauses",
    "park_us",
    "committed_step",
    "world_size",
    "not_copied",
    "children_parked",
    "children_running",
    "parked_together",
)


def _rank_as_json(rank: RankStatus) -> dict[str, object]:
    all_parked = rank.all_parked
    return {
        **{name: getattr(rank, name) for name in _RANK_FIELDS},
        "since_epoch_ns": rank.since.epoch_ns,
        "all_parked_epoch_ns": None if all_parked is None else all_parked.epoch_ns,
    }
