"""The supervisor of a dead attempt, whose job Slurm has started again on other nodes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN
from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.plan import plan_job
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.conditions import read_conditions
from hydroslurm.jobs.supervisor.supervise import Supervisor
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.values import Job, JobState

SRUN = """#!/bin/bash
# Fake srun: writes down that it was called, and starts no task, as one whose nodes are gone.
echo called >> "$CALLS"
exit 1
"""


class Client:
    """Slurm as it is after a requeue: the job runs, started once more, since just now."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def job(self, job_id: int) -> Job:
        return Job(job_id=job_id, state=JobState.RUNNING, restart_count=1, start_epoch_s=1 << 40)

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> str:
            self.asked.append(name)
            return "127.0.0.1"

        return call


def test_it_ends_and_leaves_the_living_attempt_alone(tmp_path: Path, monkeypatch: Any) -> None:
    """Its job step is gone: it starts no other one, in what would be the living attempt's nodes,
    requeues nothing, forbids nothing, and says nothing about how the job has ended."""
    srun, calls = tmp_path / "srun", tmp_path / "calls"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(calls))
    spec = loads("replicaSpecs: [{replicas: 1, template: {command: [python, a.py]}}]").job
    client, run = Client(), RunDir(tmp_path / "run").create()
    outcome = Supervisor(
        run,
        spec,
        plan_job(spec, folder=tmp_path, python="python"),
        client=client,  # type: ignore[arg-type]
        allocation=Allocation(job_id=7, nodes=("n1",)),
        environ=dict(os.environ),
        log=lambda _: None,
    ).supervise()
    assert outcome.status == MUST_NOT_RUN_AGAIN
    assert "is left alone" in outcome.message
    assert calls.read_text() == "called\n"
    assert client.asked == ["node_address"]
    assert [one.type for one in read_conditions(run.conditions_jsonl)] == ["Running"]
