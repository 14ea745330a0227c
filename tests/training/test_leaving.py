"""How a run leaves, by the reason of its stop and the kind of its allocation: a real Slurm."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from clusters import Part
from processes import wait_until
from training.trainings import LIMIT_S, SCRIPT, Training

import hydroslurm
from hydroslurm.core.events import EventKind
from hydroslurm.core.exitcodes import CANCELLED, RUN_AGAIN
from hydroslurm.errors import TargetError
from hydroslurm.jobs.requests import requeue_job
from hydroslurm.runtime.controller import StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.client import BACKEND_ENV, JobState, open_client
from hydroslurm.training import requeue as leaving
from hydroslurm.training.attempts import StopPlan
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.stopping import StopHandler

pytestmark = pytest.mark.slurm

LONG = 1000  # epochs: none of these ends by itself
Submit = Callable[..., Training]


@pytest.fixture
def submit(requeue_cluster: Part, tmp_path: Path) -> Submit:
    """Submits sbatch/requeue.sbatch; what is left at the end is cancelled."""
    started: list[Training] = []

    def start(*options: str, python: str = "", **environ: str) -> Training:
        training = Training(requeue_cluster, tmp_path / f"job{len(started)}", LONG)
        training.environ.update(environ)
        if python:  # what the batch script finds as python3
            (tmp_path / "bin").mkdir()
            (tmp_path / "bin/python3").write_text(f"#!/bin/bash\n{python}\n")
            (tmp_path / "bin/python3").chmod(0o755)
            path = requeue_cluster.child_environ()["PATH"]
            training.environ["PATH"] = f"{tmp_path / 'bin'}:{path}"
        started.append(training.submit(*options))
        return training

    yield start  # type: ignore[misc]
    for training in started:
        training.end()


def kinds(training: Training) -> list[EventKind]:
    return [event.kind for event in training.events()]


def test_a_job_cancelled_during_its_save_is_not_requeued(
    requeue_cluster: Part, tmp_path: Path
) -> None:
    """It was preempted, and while it saved a person cancelled it: Slurm would requeue it even so,
    and undo what was asked for. Ours requeues no job without a Run at all, and names Slurm's."""
    plain = Training(requeue_cluster, tmp_path, LONG)
    deaf = "--wrap=srun bash -c 'trap \"\" TERM; sleep 60'"
    job_id = int(plain.slurm("sbatch", "--parsable", deaf, "--output=/dev/null"))
    client = open_client(environ=requeue_cluster.environ())
    wait_until(lambda: client.job(job_id).state is JobState.RUNNING, "the job to start")
    wait_until(lambda: plain.slurm("squeue", "-hs", "-j", str(job_id)), "its step")
    with pytest.raises(TargetError, match=f"scontrol requeue {job_id}"):
        requeue_job(client, client.job(job_id))  # nobody in it would save
    assert client.job(job_id).state is JobState.RUNNING
    plain.slurm("scancel", str(job_id))
    with hydroslurm.installed(run_dir=tmp_path) as controller:
        stop_handler = StopHandler(
            Allocation(job_id=job_id),
            controller,
            RankGroup(controller),
            environ=requeue_cluster.child_environ(),
        )
        status = stop_handler.requeue(StopPlan("preempted", math.inf, True, RUN_AGAIN, "preempted"))
    assert status == CANCELLED
    assert client.job(job_id).restart_count == 0


def test_slurm_that_is_slow_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not answered in time says what that means: how long is counted on, what follows."""
    monkeypatch.setattr(leaving, "ANSWER_S", 0.2)
    monkeypatch.setattr(leaving, "SPREAD_S", 0.0)
    for name in ("scontrol", "squeue", "sacct"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\nexec sleep 20\n")
        program.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", BACKEND_ENV: "commands"}
    with hydroslurm.installed(run_dir=tmp_path) as controller:
        ranks = RankGroup(controller)
        stop_handler = StopHandler(Allocation(job_id=1), controller, ranks, environ=environ)
        stop_handler.note_request(StopRequest("SIGTERM", 0, time.monotonic_ns(), time.time_ns()))
        plan = stop_handler.plan()
    assert plan.requeue
    assert "counts on 25 s from the signal on, saves, and is requeued unless" in plan.message


def test_without_an_answer_of_slurms_the_batch_script_requeues(submit: Submit) -> None:
    """The rank cannot reach Slurm (as in a container without it): it leaves with 75, and the batch
    script asks for the requeue, but not for that of a cancelled job."""
    training = submit(python=f'SLURM_CONF=/nowhere exec {sys.executable} "$@"')
    training.wait_for_attempt(1)
    training.slurm("scancel", "--signal=URG", training.job_id)
    training.wait_for_attempt(2)
    assert EventKind.REQUEUE_FAILED in kinds(training)
    assert training.attempts()[1].step == training.attempts()[0].end_step
    training.slurm("scancel", training.job_id)
    ended = ("squeue", "-h", "-t", "all", "-j", training.job_id, "-o", "%T")
    wait_until(lambda: "ING" not in training.slurm(*ended), "end of the job", limit_s=120)
    assert training.slurm(*ended).strip() == "CANCELLED"


def test_an_srun_allocation_says_that_the_same_command_continues(
    requeue_cluster: Part, tmp_path: Path
) -> None:
    """Slurm cannot requeue it: it saves, leaves with 75, and the next srun goes on."""
    training = Training(requeue_cluster, tmp_path, LONG)
    command = ["srun", "--ntasks=1", sys.executable, SCRIPT, "--directory=run", "--log-every=5"]
    environ = {**requeue_cluster.child_environ(), "OMP_NUM_THREADS": "1"}
    ours = ("-n", Path(sys.executable).name, "-w", ",".join(requeue_cluster.nodes))

    def attempt() -> str:
        with (tmp_path / "out").open("w") as out:
            srun = subprocess.Popen(command, env=environ, cwd=tmp_path, stdout=out, stderr=out)
        said = (tmp_path / "out").read_text
        wait_until(lambda: "loss" in said(), said, limit_s=LIMIT_S)
        job = training.slurm("squeue", "-h", "-t", "R", *ours, "-o%A")
        training.slurm("scancel", "--signal=URG", job.splitlines()[-1])
        assert srun.wait(LIMIT_S) == RUN_AGAIN, said()
        return said()

    assert "run the same command again" in attempt()
    assert "attempt 2 resumes from step" in attempt()


def test_the_signals_of_a_warning_pause_long_before_it(submit: Submit) -> None:
    """--signal=USR1 is a request for the time near the limit: until then it pauses, and USR2 goes
    on."""
    far = submit("--time=10", "--signal=USR1@40")
    far.wait_for_attempt(1)
    for signal, kind in (("USR1", EventKind.PARKED), ("USR2", EventKind.RESUMED)):
        far.slurm("scancel", f"--signal={signal}", far.job_id)
        wait_until(lambda kind=kind: kind in kinds(far), kind.value)
    assert EventKind.STOP_REQUESTED not in kinds(far)
