"""All my jobs of hydroslurm in one line each, as they are now: what ``list`` shows.

A user may have a thousand of them, so a line rests on a few small files that are written for being
read often: the submission, the counts of attempts, the end of the conditions, the first rank's
status. The spec, the plan and the events are for ``describe``, which is asked about one job.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import starmap

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.errors import RunFolderError
from hydroslurm.jobs.control.overview import in_order, newest, pause_now, submission_of
from hydroslurm.jobs.control.plain_job import of_slurm, preempted, started
from hydroslurm.jobs.control.requests import run_dir_of
from hydroslurm.jobs.submission import Submission
from hydroslurm.jobs.supervisor.attempts import Attempts, count_preemptions, count_restarts
from hydroslurm.jobs.supervisor.conditions import Condition, newest_conditions
from hydroslurm.slurm.client import SlurmClient
from hydroslurm.slurm.values import Job


@dataclass(frozen=True)
class ListedJob:
    """One job of a list.

    Attributes:
        condition: what it is now; None before anybody has said anything.
        replicas: as the spec has it; without a spec the ranks that have announced themselves.
        restarts: of a job with a spec, failed attempts that another one followed; without one,
            Slurm's count.
        backoff_limit: how many of them the spec allows; None without a spec.
        preemptions: as far as its supervisor or its first rank knows; None where nobody looks.
        more_preemptions: whether a restart may have been one that no rank could tell from a requeue
            by hand: of what comes without a grace only accounting knows.
    """

    slurm: Job
    name: str
    condition: Condition | None
    replicas: int
    restarts: int
    backoff_limit: int | None
    preemptions: int | None
    more_preemptions: bool = False


def my_jobs(client: SlurmClient, user: str) -> tuple[ListedJob, ...]:
    """All jobs of a user that hydroslurm has a part in; one question to Slurm."""
    found = map(_listed, client.jobs(user=user))
    return tuple(one for one in found if one is not None)


def _listed(slurm: Job) -> ListedJob | None:
    """None for a job that hydroslurm has no part in, or whose folder cannot be read."""
    run = run_dir_of(slurm)
    try:
        asked = submission_of(run)
        files = run.rank_status_names()
        first = read_status(files[min(files)]) if files else None
        if asked is not None and asked.replicas is not None:
            return _with_spec(run, slurm, asked, first)
        is_ours = asked is not None or files or run.events.is_dir()
        if not is_ours or (asked is None and os.path.lexists(run.job_yaml)):
            return None
        return _without_spec(slurm, asked, first, ranks=len(files))
    except (RunFolderError, OSError):
        return None


def _with_spec(run: RunDir, slurm: Job, asked: Submission, first: RankStatus | None) -> ListedJob:
    attempts = Attempts(run.starts_jsonl).all()
    conditions = (*newest_conditions(run.conditions_jsonl), *pause_now(first))
    return ListedJob(
        slurm=slurm,
        name=asked.name,
        condition=newest(in_order(conditions, slurm)),
        replicas=asked.replicas or 0,
        restarts=count_restarts(attempts),
        backoff_limit=asked.backoff_limit,
        preemptions=count_preemptions(attempts),
    )


def _without_spec(
    slurm: Job, asked: Submission | None, first: RankStatus | None, *, ranks: int
) -> ListedJob:
    conditions = list(of_slurm(slurm))
    # a named folder may have had other jobs
    mine = first if first is not None and first.job_id == slurm.job_id else None
    known: dict[int, int] = {}
    if mine is not None:
        known = dict(mine.preempted)
        conditions += [
            started(mine.started.epoch_ns, mine.restart_count, mine.host),
            *starmap(preempted, ((epoch_ns, count) for count, epoch_ns in known.items())),
            *pause_now(mine),
        ]
    # accounting knows those that no rank has noticed, but only describe asks it
    is_told = slurm.restart_count in (0, None) or (mine is not None and bool(mine.saver))
    return ListedJob(
        slurm=slurm,
        name=slurm.name or (asked.name if asked is not None else ""),
        condition=newest(in_order(conditions, slurm)),
        replicas=ranks,
        restarts=slurm.restart_count or 0,
        backoff_limit=None,
        preemptions=len(known) if is_told else None,
        more_preemptions=(slurm.restart_count or 0) > len(known),
    )
