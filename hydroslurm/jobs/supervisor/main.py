"""``python -m hydroslurm.jobs.supervisor.main [--clean] RUN_FOLDER``: the program of a batch script
of a TrainingJob, the supervisor; and of the job that cleans up after it, the janitor.

The janitor is a job of its own that depends on the end of the first. Slurm starts it when that job
has ended for good, not at a requeue (seen on 22.05.8).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import HydroslurmError, LaunchError, SlurmError, StaleAttempt
from hydroslurm.jobs.plan import Plan, read_plan, read_submission
from hydroslurm.jobs.supervisor import CLEAN
from hydroslurm.jobs.supervisor.attempts import Attempts, Ending
from hydroslurm.jobs.supervisor.conditions import add_condition, final_condition, read_conditions
from hydroslurm.jobs.supervisor.notify import notifying
from hydroslurm.jobs.supervisor.supervise import Supervisor
from hydroslurm.jobs.supervisor.tensorboard import tensorboard
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import open_client
from hydroslurm.slurm.values import Job


def supervise(root: Path, *, environ: Mapping[str, str]) -> int:
    """Supervise the job of a run folder, within the allocation that this process is in; return the
    exit status of its batch script.

    Raises:
        LaunchError: the folder holds no job, or this is not a batch script.
        RunFolderError: others may have written what it is to run.
    """
    run = RunDir(root)
    plan = trusted_plan(run)
    allocation = Allocation.from_environ(environ)
    if allocation is None:
        raise LaunchError("a supervisor runs in the batch script of its job; submit the job")
    with notifying(plan, run, log=log), tensorboard(plan.tensorboard, run, log=log):
        if plan.elastic is not None:
            from hydroslurm.jobs.supervisor.elastic import ElasticSupervisor

            return ElasticSupervisor(
                run, plan, allocation=allocation, environ=environ, log=log
            ).supervise()
        outcome = Supervisor(
            run, plan, client=open_client(environ=environ), allocation=allocation,
            environ=environ, log=log,
        ).supervise()  # fmt: skip
    log(outcome.message)
    return outcome.status


def trusted_plan(run: RunDir) -> Plan:
    """Read what a job is to run.

    Raises:
        LaunchError: the folder holds no job.
        RunFolderError: others may have written it.
    """
    run.check()
    try:
        check_trusted(run.plan_json, what="the job's plan", shared=True)
    except OSError as error:
        raise LaunchError(f"{run.root} is not the run folder of a job: {error}") from error
    return read_plan(run.plan_json)


def clean(root: Path, *, environ: Mapping[str, str]) -> str:
    """Apply cleanPolicy, and record how the job ended unless that is recorded; returns what was
    done.

    The job's processes need no cleaning: they ended with it, but for the members of an elastic one.
    """
    run = RunDir(root)
    plan = read_plan(run.plan_json)
    done = []
    if final_condition(read_conditions(run.conditions_jsonl)) is None:
        last = _last_record(run, environ)
        state = "UNKNOWN" if last is None else last.state.value
        cancelled = state == "CANCELLED"
        for attempt in Attempts(run.starts_jsonl).all():
            if attempt.ending is None:
                ending = Ending.CANCELLED if cancelled else Ending.FAILED
                Attempts(run.starts_jsonl).end(attempt, ending)
        message = f"the job ended {state}, and its supervisor with it"
        reason = "Cancelled" if cancelled else "SupervisorLost"
        with notifying(plan, run, log=log):
            add_condition(run.conditions_jsonl, "Failed", reason=reason, message=message)
        done.append(message)
    run.tensorboard_json.unlink(missing_ok=True)
    if plan.limits.clean_policy == "All" and run.scratch.is_dir():
        shutil.rmtree(run.scratch, ignore_errors=True)
        done.append("scratch folders removed")
    if plan.elastic is not None:
        from hydroslurm.jobs.supervisor.elastic import allocator_of

        allocator_of(run, plan, environ=environ, log=log).cancel_all()
    return "; ".join(done) or "nothing was left to do"


def _last_record(run: RunDir, environ: Mapping[str, str]) -> Job | None:
    """The job as slurmctld describes it, else its newest record in accounting."""
    job_id = read_submission(run.root).job_id
    if job_id is None:
        return None
    client = open_client(environ=environ)
    for ask in (client.jobs_of, client.history):
        with contextlib.suppress(SlurmError):
            return ask(JobId.parse(job_id))[-1]
    return None


def log(message: str) -> None:
    """A line of the batch script's output; a full disk must not end what supervises the job."""
    with contextlib.suppress(OSError):
        print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} hydroslurm: {message}", flush=True)


def main(arguments: list[str]) -> int:
    try:
        if arguments[0] == CLEAN:
            log(f"cleaned up: {clean(Path(arguments[1]), environ=os.environ)}")
            return 0
        return supervise(Path(arguments[0]), environ=os.environ)
    except StaleAttempt as error:
        log(str(error))
        return 0
    except SlurmError as error:
        log(f"{error}; this job goes back into the queue")
        return RUN_AGAIN
    except HydroslurmError as error:
        log(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
