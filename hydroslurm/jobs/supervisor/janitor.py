"""What is done behind a job, whatever has ended it: a job of its own, which depends on the end of
the first. Slurm starts it when that one has really ended, not at a requeue (seen on 22.05.8)."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import SlurmError
from hydroslurm.jobs.launch import submission
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.attempts import Attempts, Ending
from hydroslurm.jobs.supervisor.conditions import add_condition, read_conditions, verdict
from hydroslurm.slurm.client import open_client
from hydroslurm.slurm.values import Job


def clean(root: Path, *, environ: Mapping[str, str]) -> str:
    """Carry cleanPolicy out, and write down how the job has ended where nobody has done so. What
    ran in the job is gone with it. Says what was done."""
    run = RunDir(root)
    job = loads(run.job_yaml.read_text(encoding="utf-8"), name=str(run.job_yaml), folder=root).job
    done = []
    if verdict(read_conditions(run.conditions_jsonl)) is None:
        last = _last_life(run, environ)
        state = "UNKNOWN" if last is None else last.state.value
        cancelled = state == "CANCELLED"
        for attempt in Attempts(run.attempts).all():
            if attempt.ending is None:
                ending = Ending.CANCELLED if cancelled else Ending.FAILED
                Attempts(run.attempts).end(attempt, ending)
        words = f"the job ended {state}, and its supervisor with it"
        reason = "Cancelled" if cancelled else "SupervisorLost"
        add_condition(run.conditions_jsonl, "Failed", reason=reason, message=words)
        done.append(words)
    run.tensorboard_json.unlink(missing_ok=True)
    scratch = root / "scratch"
    if job.run_policy.clean_policy == "All" and scratch.is_dir():
        shutil.rmtree(scratch, ignore_errors=True)
        done.append("scratch folders removed")
    return "; ".join(done) or "nothing was left to do"


def _last_life(run: RunDir, environ: Mapping[str, str]) -> Job | None:
    job_id = submission.read(run.root).job_id
    if job_id is None:
        return None
    client = open_client(environ=environ)
    try:
        return client.job(int(job_id))
    except SlurmError:
        try:
            return client.history(int(job_id))[-1]
        except (SlurmError, IndexError):
            return None
