"""What a supervisor makes of a srun that is killed, of one that gets no job step, and of its job
which Slurm has started again on other nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import NoSuchJob, RunFolderError
from hydroslurm.jobs.layout import plan_job
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor import supervise
from hydroslurm.jobs.supervisor.attempts import Attempt, Attempts, Ending
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


GONE = """#!/bin/bash
# Fake srun: writes down that it was called, and starts no task, as one whose nodes are gone.
echo called >> "$CALLS"
exit 1
"""


class Client:
    """Slurm, of a job that runs and that nobody has stopped; writes down what it is asked to do."""

    def __init__(self, **job: int) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self._job = job

    def job(self, job_id: int) -> Job:
        return Job(job_id=job_id, state=JobState.RUNNING, **{"start_epoch_s": 1, **self._job})

    def node_address(self, _: str) -> str:
        return "127.0.0.1"

    def history(self, job_id: JobId) -> tuple[Job, ...]:
        raise NoSuchJob(str(job_id))

    def signal(self, job: Job, number: int, *, step: int) -> None:
        self.asked.append(("signal", job.job_id, int(number), step))

    def requeue(self, job: Job) -> None:
        self.asked.append(("requeue", job.job_id))


def supervised(
    spec: str, srun: str, client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunDir, supervise.Outcome]:
    """A supervisor from its begin to its end, with a srun of our own."""
    program = folder / "srun"
    program.write_text(srun)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(folder / "calls"))
    run, job = RunDir(folder / "run").create(), loads(spec).job
    supervisor = supervise.Supervisor(
        run,
        plan_job(job, folder=folder, python="python"),
        client=client,
        allocation=Allocation(job_id=7, nodes=("n1",)),
        environ=dict(os.environ),
        log=lambda _: None,
    )
    return run, supervisor.supervise()


NEVER = "replicaSpecs: [{restartPolicy: Never, template: {command: [python, a.py]}}]\n"


def test_neither_is_a_failure_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the job step of a killed srun is ended and started again, also where nothing
    that fails may be; where Slurm makes no job step in time the job goes back into the queue."""
    monkeypatch.setattr(supervise, "STEP_WITHIN_S", 0.3)
    spec, client = NEVER + "runPolicy: {backoffLimit: 0}\n", Client()
    run, outcome = supervised(spec, SRUN, client, tmp_path, monkeypatch)
    assert client.asked == [("signal", 7, 9, 4), ("requeue", 7)]
    assert outcome.status == RUN_AGAIN
    attempts = Attempts(run.starts_jsonl).all()
    assert [one.ending for one in attempts] == [Ending.LOST, Ending.PREEMPTED]
    said = [(one.type, one.reason) for one in read_conditions(run.conditions_jsonl)]
    started = ("Running", "Started")
    again = [("Restarting", "SrunKilled"), started, ("Preempted", "StepCannotStart")]
    assert said == [started, *again]
    assert "(Requested nodes are busy)" in outcome.message
    # the srun that waited is not left behind
    pid = attempts[1].srun_pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_full_disk_keeps_no_job_from_its_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditions and the end of an attempt cannot be written: an attempt without one was ended by
    Slurm, and the next start of the job says so."""
    monkeypatch.setattr(supervise, "STEP_WITHIN_S", 0.3)
    end = Attempts.end

    def full(*_: Any, **__: Any) -> None:
        raise RunFolderError("No space left on device")

    def end_or_not(log: Attempts, attempt: Attempt, ending: Ending, **more: Any) -> Any:
        return (full if ending is Ending.PREEMPTED else end)(log, attempt, ending, **more)

    monkeypatch.setattr(supervise, "add_condition", full)
    monkeypatch.setattr(Attempts, "end", end_or_not)
    client = Client()
    assert supervised(NEVER, SRUN, client, tmp_path, monkeypatch)[1].status == RUN_AGAIN
    assert client.asked[-1] == ("requeue", 7)


def test_it_ends_and_leaves_the_living_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its job step is gone: it starts no other one, in what would be the living attempt's nodes,
    requeues nothing, forbids nothing, and says nothing about how the job has ended."""
    spec = "replicaSpecs: [{replicas: 1, template: {command: [python, a.py]}}]"
    client = Client(restart_count=1, start_epoch_s=1 << 40)  # started once more, since just now
    run, outcome = supervised(spec, GONE, client, tmp_path, monkeypatch)
    assert outcome.status == MUST_NOT_RUN_AGAIN
    assert "is left alone" in outcome.message
    assert (tmp_path / "calls").read_text() == "called\n"
    assert client.asked == []
    assert [one.type for one in read_conditions(run.conditions_jsonl)] == ["Running"]
