"""What a supervisor makes of a srun that is killed, and of one that gets no job step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import NoSuchJob
from hydroslurm.jobs.plan import plan_job
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor import supervise
from hydroslurm.jobs.supervisor.attempts import Attempts, Ending
from hydroslurm.jobs.supervisor.conditions import read_conditions
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.values import Job, JobState

SRUN = """#!/bin/bash
# Fake srun, with the messages of 22.05.8: the first one starts its task and is killed, the second
# one waits for a job step, for ever.
echo called >> "$CALLS"
if [ "$(wc -l < "$CALLS")" = 1 ]; then
    echo "srun: launching StepId=7.4 on host n1, 1 tasks: 0"
    kill -KILL $$
fi
echo "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
exec sleep 1000
"""


class Client:
    """Slurm, of a job that runs and that nobody has stopped; writes down what it is asked to do."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def job(self, job_id: int) -> Job:
        return Job(job_id=job_id, state=JobState.RUNNING, start_epoch_s=1)

    def node_address(self, _: str) -> str:
        return "127.0.0.1"

    def history(self, job_id: int) -> tuple[Job, ...]:
        raise NoSuchJob(str(job_id))

    def signal(self, job_id: int, number: int, *, step: int) -> None:
        self.asked.append(("signal", job_id, int(number), step))

    def requeue(self, job_id: int) -> None:
        self.asked.append(("requeue", job_id))


def test_neither_is_a_failure_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the job step of a killed srun is ended and started again, also where nothing
    that fails may be; where Slurm makes no job step in time the job goes back into the queue."""
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setattr(supervise, "STEP_WITHIN_S", 0.3)
    spec = loads(
        "replicaSpecs: [{restartPolicy: Never, template: {command: [python, a.py]}}]\n"
        "runPolicy: {backoffLimit: 0}\n"
    ).job
    client, run = Client(), RunDir(tmp_path / "run").create()
    outcome = supervise.Supervisor(
        run,
        spec,
        plan_job(spec, folder=tmp_path, python="python"),
        client=client,  # type: ignore[arg-type]
        allocation=Allocation(job_id=7, nodes=("n1",)),
        environ=dict(os.environ),
        log=lambda _: None,
    ).supervise()
    assert client.asked == [("signal", 7, 9, 4), ("requeue", 7)]
    assert outcome.status == RUN_AGAIN
    attempts = Attempts(run.attempts).all()
    assert [one.ending for one in attempts] == [Ending.LOST, Ending.PREEMPTED]
    said = [(one.type, one.reason) for one in read_conditions(run.conditions_jsonl)]
    assert said == [
        ("Running", "Started"),
        ("Restarting", "SrunKilled"),
        ("Running", "Started"),
        ("Preempted", "StepCannotStart"),
    ]
    assert "(Requested nodes are busy)" in outcome.message
    # the srun that waited is not left behind
    pid = attempts[1].srun_pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
