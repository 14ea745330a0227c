"""From a run folder to the supervisor of the job that this process is the batch script of."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import check_trusted
from hydroslurm.errors import LaunchError
from hydroslurm.jobs.launch.plan import Plan
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.supervise import Outcome, Supervisor
from hydroslurm.jobs.supervisor.tensorboard import tensorboard
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import open_client


def supervise(root: Path, *, environ: Mapping[str, str]) -> Outcome:
    """Supervise one life of the job.

    Raises:
        LaunchError: the folder holds no job, or this is no batch script.
        RunFolderError: others may have written what it says to run.
    """
    run = RunDir(root)
    run.check()
    allocation = Allocation.from_environ(environ)
    if allocation is None:
        raise LaunchError("a supervisor runs in the batch script of its job; submit the job")
    try:
        for file in (run.job_yaml, run.plan_json):
            check_trusted(file, what="the job's plan", shared=True)
        job = loads(
            run.job_yaml.read_text(encoding="utf-8"), name=str(run.job_yaml), folder=root
        ).job
        plan = Plan.loads(run.plan_json.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LaunchError(f"{root} is not the run folder of a TrainingJob: {error}") from error
    supervisor = Supervisor(
        run,
        job,
        plan,
        client=open_client(environ=environ),
        allocation=allocation,
        environ=environ,
        say=_say,
    )
    with tensorboard(job.tensorboard, run, say=_say):
        return supervisor.supervise()


def _say(words: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} hydroslurm: {words}", flush=True)


def main(arguments: list[str]) -> int:
    """``python -m hydroslurm.jobs.supervisor RUN_FOLDER``"""
    import os

    return supervise(Path(arguments[0]), environ=os.environ).status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
