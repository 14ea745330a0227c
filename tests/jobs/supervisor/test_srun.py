"""The srun of an attempt: its command, what its messages say of the tasks, and what a supervisor
makes of one that is killed, that gets no job step, or whose job Slurm has started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.core import registry
from hydroslurm.core.exitcodes import MUST_NOT_RUN_AGAIN, RUN_AGAIN
from hydroslurm.core.jobid import JobId
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import NoSuchJob, RunFolderError
from hydroslurm.jobs.layout import plan_job, rank_variables
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor import supervise
from hydroslurm.jobs.supervisor.attempts import Attempt, Attempts, Ending
from hydroslurm.jobs.supervisor.conditions import read_conditions
from hydroslurm.jobs.supervisor.job_step import (
    RunningStep,
    TaskExits,
    host_list,
    last_error,
    srun_command,
    task_ends,
)
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.slurm.values import Job, JobState


def planned(text: str) -> Plan:
    return plan_job(loads(text).job, folder=Path("/work"), python="/venv/bin/python")


def test_ends_are_read_as_they_come(tmp_path: Path) -> None:
    """Half a line is no end yet; the order of the ends is kept; one task ends once."""
    log = tmp_path / "srun.log"
    ends = TaskExits(log)
    ends.look()
    assert ends.statuses == {}
    log.write_text("srun: error: n2: task 1: Exited with exit code 3\nsrun: error: n1: ta")
    ends.look()
    assert ends.statuses == {1: 3}
    with log.open("a") as file:
        file.write("sk 0: Killed\nsrun: error: n2: task 1: Killed\n")
    ends.look()
    assert list(ends.statuses.items()) == [(1, 3), (0, 137)]
    ends.fill_in(3, 1)
    assert list(ends.statuses.items()) == [(1, 3), (0, 137), (2, 1)]


def test_the_layout_is_said_to_srun() -> None:
    """Even nodes by a number; uneven ones by a list of nodes, in the order of the ranks."""
    even = planned("replicaSpecs: [{replicas: 2, template: {command: [python, a.py]}}]")
    message = srun_command(even, RunDir(Path("/r/100%")))
    assert "--ntasks-per-node=1" in message
    assert "--output=/r/100%%/logs/task-%t.log" in message
    uneven = planned(
        "replicaSpecs:\n"
        "  - {type: worker, replicas: 2, template: {command: [a], resources: {nodes: 1}}}\n"
        "  - {type: master, template: {command: [a]}}\n"
    )
    message = srun_command(uneven, RunDir(Path("/r")))
    assert "--distribution=arbitrary" in message
    assert not any(word.startswith("--nodes") for word in message)  # 25.11 refuses the two together
    assert host_list(uneven, ["n7", "n9"]) == "n7\nn9\nn9\n"


def test_ranks_are_told_what_the_spec_says() -> None:
    """What it does not say of preemption is left to the script."""
    spec = "replicaSpecs: [{template: {command: [a]}}]\npreemption: {mode: %s}"
    for mode, preempt in (("pause", "pause"), ("requeue", "requeue"), ("both", "pause")):
        made = rank_variables(loads(spec % mode).job)
        assert made["HYDROSLURM_PREEMPT"] == preempt
        assert "HYDROSLURM_SAVE_EVERY_S" not in made
    made = rank_variables(loads(spec % "both, saveEverySeconds: 0").job)
    assert made["HYDROSLURM_SAVE_EVERY_S"] == "0"


def test_a_step_of_another_supervisor_is_ended() -> None:
    """By its pid, if that is still the same process; SIGKILL where SIGTERM is not heard."""
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print('ready', flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", deaf], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    started = registry.start_ticks(child.pid)
    assert started is not None
    another = RunningStep(child.pid, started + 1)
    assert another.has_ended()
    another.end()
    assert child.poll() is None
    RunningStep(child.pid, started).end(patience_s=0.1)
    assert child.wait(60) == -signal.SIGKILL
    child.stdin.close()  # type: ignore[union-attr]
    child.stdout.close()


def test_what_srun_says_when_it_starts_nothing(tmp_path: Path) -> None:
    """Its last error, for the job's conditions; where there is none, the place to look."""
    log = tmp_path / "srun.log"
    log.write_text(
        "srun: jobid 3\nsrun: error: first\nsrun: error: Unable to create step\nsrun: x\n"
    )
    assert last_error(log) == "srun: error: Unable to create step"
    log.write_text("srun: jobid 3\n")
    assert str(log) in last_error(log)


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        ("srun: error: n[1-2]: tasks 0-1,3: Exited with exit code 1", [(0, 1), (1, 1), (3, 1)]),
        ("srun: error: n2: task 2: Terminated", [(2, 143)]),
        ("srun: error: gpu-01: task 7: Segmentation fault (core dumped)", [(7, 139)]),
        ("srun: error: n3: task 3: Segmentation fault", [(3, 139)]),
        ("srun: error: n1: task 0: Out Of Memory", [(0, 137)]),
        ("srun: error: n1: task 0: User defined signal 1", [(0, 138)]),
        ("srun: launch/slurm: _task_finish: n1: task 0: Completed", [(0, 0)]),
        ("srun: n1: tasks 0-2: Completed", [(0, 0), (1, 0), (2, 0)]),
        ("srun: error: Unable to create step for job 5: Job/step already completing", []),
        ("srun: launching StepId=13.0 on host n1, 2 tasks: [0-1]", []),
        ("srun: launch/slurm: _task_start: Node n2, 2 tasks started", []),
        ("srun: launch/slurm: _task_finish: Received task exit notification for 1 task of "
         "StepId=13.0 (status=0x0300).", []),
        ("srun: Job step aborted: Waiting up to 32 seconds for job step to finish.", []),
        ("what a task prints: n1: task 0: Killed", []),
    ],
)  # fmt: skip
def test_lines(line: str, ends: list[tuple[int, int]]) -> None:
    """Each form of 22.05.8, and what is none."""
    assert list(task_ends(line)) == ends


SRUN = """#!/bin/bash
# Fake srun, with the messages of 22.05.8: the first one starts its task and is killed, the second
# one waits for a job step, for ever.
echo called >> "$0.calls"
if [ "$(wc -l < "$0.calls")" = 1 ]; then
    echo "srun: launching StepId=7.4 on host n1, 1 tasks: 0"
    kill -KILL $$
fi
echo "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)"
exec sleep 1000
"""


GONE = """#!/bin/bash
# Fake srun: writes down that it was called, and starts no task, as one whose nodes are gone.
echo called >> "$0.calls"
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

    def set_requeue(self, job: Job, *, allowed: bool) -> None:
        self.asked.append(("may requeue", allowed))


class Supervised:
    """A supervisor from its begin to its end, with a srun of our own."""

    def __init__(self, programs: Callable[..., Path], folder: Path) -> None:
        self._programs, self._folder = programs, folder
        self.client = Client()
        self.run = RunDir(folder / "run").create()
        self.calls = programs() / "srun.calls"

    def end(self, spec: str, srun: str) -> supervise.Outcome:
        self._programs(srun=srun)
        return supervise.Supervisor(
            self.run,
            plan_job(loads(spec).job, folder=self._folder, python="python"),
            client=self.client,  # type: ignore[arg-type]
            allocation=Allocation(job_id=7, nodes=("n1",)),
            environ=dict(os.environ),
            log=lambda _: None,
        ).supervise()

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return Attempts(self.run.starts_jsonl).all()

    def conditions(self) -> list[tuple[str, str]]:
        return [(one.type, one.reason) for one in read_conditions(self.run.conditions_jsonl)]


@pytest.fixture
def of(
    programs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Supervised:
    monkeypatch.setattr(supervise, "STEP_WITHIN_S", 0.3)
    return Supervised(programs, tmp_path)


NEVER = "replicaSpecs: [{restartPolicy: Never, template: {command: [python, a.py]}}]\n"


def test_neither_is_a_failure_of_the_training(of: Supervised) -> None:
    """What is left of the job step of a killed srun is ended and started again, also where nothing
    that fails may be; where Slurm makes no job step in time the job goes back into the queue."""
    outcome = of.end(NEVER + "runPolicy: {backoffLimit: 0}\n", SRUN)
    assert of.client.asked == [("signal", 7, 9, 4), ("requeue", 7)]
    assert outcome.status == RUN_AGAIN
    assert [one.ending for one in of.attempts] == [Ending.LOST, Ending.PREEMPTED]
    started = ("Running", "Started")
    again = [("Restarting", "SrunKilled"), started, ("Preempted", "StepCannotStart")]
    assert of.conditions() == [started, *again]
    assert "(Requested nodes are busy)" in outcome.message
    # the srun that waited is not left behind
    pid = of.attempts[1].srun_pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_job_ends_when_its_active_seconds_are_over(of: Supervised) -> None:
    """Those of the attempts before this one count, and it is not for Slurm to start it again."""
    of.run.active_json.write_text('{"active_s": 3599.5}')
    srun = 'echo "srun: launching StepId=7.4 on host n1, 1 tasks: 0"\nexec sleep 1000'
    outcome = of.end(NEVER + "runPolicy: {activeDeadlineSeconds: 3600}\n", srun)
    assert outcome.status == MUST_NOT_RUN_AGAIN
    assert "activeDeadlineSeconds (3600)" in outcome.message
    assert [one.ending for one in of.attempts] == [Ending.DEADLINE]
    assert of.conditions()[-1] == ("Failed", "DeadlineExceeded")
    assert of.client.asked[0] == ("may requeue", False)


def test_a_full_disk_keeps_no_job_from_its_requeue(
    of: Supervised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conditions and the end of an attempt cannot be written: an attempt without one was ended by
    Slurm, and the next start of the job says so."""
    end = Attempts.end

    def full(*_: Any, **__: Any) -> None:
        raise RunFolderError("No space left on device")

    def end_or_not(log: Attempts, attempt: Attempt, ending: Ending, **more: Any) -> Any:
        return (full if ending is Ending.PREEMPTED else end)(log, attempt, ending, **more)

    monkeypatch.setattr(supervise, "add_condition", full)
    monkeypatch.setattr(Attempts, "end", end_or_not)
    assert of.end(NEVER, SRUN).status == RUN_AGAIN
    assert of.client.asked[-1] == ("requeue", 7)


def test_it_ends_and_leaves_the_living_attempt_alone(of: Supervised) -> None:
    """Its job step is gone: it starts no other one, in what would be the living attempt's nodes,
    requeues nothing, forbids nothing, and says nothing about how the job has ended."""
    of.client = Client(restart_count=1, start_epoch_s=1 << 40)  # started once more, since just now
    outcome = of.end("replicaSpecs: [{template: {command: [python, a.py]}}]", GONE)
    assert outcome.status == MUST_NOT_RUN_AGAIN
    assert "is left alone" in outcome.message
    assert of.calls.read_text() == "called\n"
    assert of.client.asked == []
    assert [kind for kind, _ in of.conditions()] == ["Running"]
