"""What is known of a job step from srun's message, and the command that starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.core import registry
from hydroslurm.jobs.layout import plan_job, rank_variables
from hydroslurm.jobs.plan import Plan
from hydroslurm.jobs.spec.reading import loads
from hydroslurm.jobs.supervisor.job_step import (
    RunningStep,
    TaskExits,
    host_list,
    last_error,
    srun_command,
    task_ends,
)


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
    message = srun_command(even, plan_file=Path("/r/p"), logs=Path("/r/100%"), python="py")
    assert "--ntasks-per-node=1" in message
    assert "--output=/r/100%%/task-%t.log" in message
    uneven = planned(
        "replicaSpecs:\n"
        "  - {type: worker, replicas: 2, template: {command: [a], resources: {nodes: 1}}}\n"
        "  - {type: master, template: {command: [a]}}\n"
    )
    message = srun_command(uneven, plan_file=Path("/r/p"), logs=Path("/r/l"), python="py")
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
