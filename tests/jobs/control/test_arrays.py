"""Job arrays on a real Slurm: what is done to an element is done to no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import text_of, wait_until
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.core.jobid import JobId
from hydroslurm.devcluster import DevCluster
from hydroslurm.errors import NoSuchJob
from hydroslurm.slurm.client import Job, JobState, open_client

pytestmark = pytest.mark.slurm

TRAIN = """
import os, time, torch, hydroslurm
task = os.environ["SLURM_ARRAY_TASK_ID"]
def say(word):
    with open(f"said-{task}", "a") as out:
        print(word, file=out)
model = torch.nn.Linear(1, 1)
with hydroslurm.Run(model=model, every_s=0) as run:
    run.resume()
    say("resumed" if run.step else "began")
    while not os.path.exists(f"finish-{task}"):
        time.sleep(0.05)
        model(torch.ones(1))
        run.step += 1
        run.safe_point()
say("finished")
"""

BATCH = """#!/bin/bash
#SBATCH --partition=low --ntasks=1 --cpus-per-task=8 --requeue --open-mode=append --output=out-%a
HYDROSLURM_GATE=hooks exec hydroslurm batch -- srun --cpus-per-task=8 python3 train.py
"""


@dataclass
class Array:
    """Elements that train, each on a node of its own."""

    cluster: DevCluster
    folder: Path
    number: int = 0

    def submit(self, tasks: str) -> None:
        (self.folder / "train.py").write_text(TRAIN)
        (self.folder / "job.sh").write_text(BATCH)
        sbatch = ["env", "-C", str(self.folder), "sbatch", "--parsable"]
        self.number = int(self.cluster.run([*sbatch, f"--array={tasks}", "job.sh"]).stdout)

    def job(self, task: int) -> Job:
        client = open_client("commands", environ=self.cluster.child_environ())
        (job,) = client.jobs_of(JobId(self.number, task))
        return job

    def is_cancelled(self, task: int) -> bool:
        try:
            return self.job(task).state is JobState.CANCELLED
        except NoSuchJob:  # 26.05 forgets at once what has never started
            return True

    def said(self, task: int) -> list[str]:
        return text_of(self.folder / f"said-{task}").split()

    def wait(self, task: int, *said: str) -> None:
        def what() -> str:
            logs = [log.read_text() for log in self.folder.glob(f"out-{task}")]
            return f"element {task}: {said}, not {self.said(task)}; {logs}"

        wait_until(lambda: self.said(task) == list(said), what, limit_s=300)

    def run(self, *words: str) -> tuple[int, str]:
        """The command line, ``A`` standing for the array: its status, and what it prints."""
        command = [word.replace("A", str(self.number)) for word in words]
        done = CliRunner().invoke(app, command, env=self.cluster.child_environ())
        said = f"{done.output}{'' if done.exit_code == 0 else done.exception}"
        return done.exit_code, re.sub(rf"\b{self.number}(?=_| is a )", "A", said)

    def slurm(self, *words: str) -> None:
        self.cluster.run([word.replace("A", str(self.number)) for word in words])


@pytest.fixture
def array(requeue_cluster: DevCluster, tmp_path: Path) -> Iterator[Array]:
    made = Array(requeue_cluster, tmp_path)
    yield made
    requeue_cluster.run(["scancel", str(made.number)], check=False)
    gone = ["squeue", "-h", "-j", str(made.number)]
    wait_until(lambda: not requeue_cluster.run(gone, check=False).stdout, "the array's end")


def test_an_element_is_stopped_and_its_neighbours_are_not(array: Array) -> None:
    """One finished, one that runs, and the last, which has the array's number: preempted, requeued
    by hand, paused, at its time limit and cancelled. To Slurm that number means all of them."""
    (array.folder / "finish-0").touch()
    array.submit("0-2")
    for task, said in ((0, ["began", "finished"]), (1, ["began"]), (2, ["began"])):
        array.wait(task, *said)
    wait_until(lambda: array.job(0).state is JobState.COMPLETED, "element 0 has ended")
    finished, running, last = map(array.job, range(3))
    assert last.job_id == array.number

    def neighbours_are_untouched() -> None:
        for task, before in ((0, finished), (1, running)):
            after = array.job(task)
            assert (after.state, after.restart_count) == (before.state, 0)
            assert after.start_epoch_s == before.start_epoch_s
        assert (array.said(0), array.said(1)) == (["began", "finished"], ["began"])

    where = ["-p", "urgent", "-w", last.nodes[0], "-c8", "-o", "/dev/null"]
    array.slurm("sbatch", *where, "--wrap=true")
    array.wait(2, "began", "resumed")
    neighbours_are_untouched()

    wait_until(lambda: array.run("requeue", "A_2")[0] == 0, "its status says that it saves")
    array.wait(2, "began", "resumed", "resumed")
    neighbours_are_untouched()

    status, out = array.run("pause", "--job", "A_2")
    assert (status, "job A_2: scontrol suspend" in out) == (0, True), out
    assert array.job(2).state is JobState.SUSPENDED
    status, out = array.run("status", "A")
    for name, state in (("A_0", "COMPLETED"), ("A_1", "RUNNING"), ("A_2", "SUSPENDED")):
        assert f"job {name} job.sh: {state}" in out
    assert array.run("resume", "--job", "A_2")[0] == 0
    neighbours_are_untouched()

    for verb in ("pause", "resume", "requeue", "cancel", "describe", "logs", "doctor"):
        status, out = array.run(*verb.split(), "A")
        assert status in (1, 2), verb
        assert "A is a job array; name the element that you mean: A_" in out, verb
        assert all(f"A_{task} (" in out for task in range(3)), verb
    assert "neither the id of a job" in array.run("pause", "--job", "A__2")[1]
    for words in (["top", "A"], ["list"]):
        assert all(f"A_{task}" in array.run(*words)[1] for task in (1, 2)), words
    assert "Slurm:        job A_2, RUNNING" in array.run("describe", "A_2")[1]
    assert "job A_2 in partition low" in array.run("doctor", "A_2")[1]

    array.slurm("scontrol", "update", "JobId=A_2", "EndTime=now+1")
    array.wait(2, "began", "resumed", "resumed", "resumed")
    neighbours_are_untouched()

    assert "job A_2 is cancelled" in array.run("cancel", "A_2")[1]
    wait_until(lambda: array.is_cancelled(2), "it is cancelled")
    neighbours_are_untouched()
    status, out = array.run("cancel", "--all-elements", "A")
    assert (status, out.count("has ended already"), "job A_1 is cancelled" in out) == (0, 2, True)
    wait_until(lambda: array.job(1).state is JobState.CANCELLED, "its neighbour, too")
    assert array.said(0) == ["began", "finished"]


def test_elements_that_wait(array: Array) -> None:
    """Behind a throttle one is held and one cancelled; neither the other nor the one that runs is
    touched, and a requeue of that one is for it alone."""
    array.submit("0-2%1")
    array.wait(0, "began")
    array.slurm("scontrol", "hold", "A_1")
    running, held = array.job(0), array.job(1)
    assert (held.state, held.reason[:7]) == (JobState.PENDING, "JobHeld")
    assert "job A_1 job.sh: PENDING (JobHeld" in array.run("status", "A_1")[1]
    assert "A_2 (PENDING)" in array.run("cancel", "A")[1]
    for verb in ("pause", "resume", "requeue"):
        status, out = array.run(*verb.split(), "A_1")
        assert (status, "job A_1: it is PENDING" in out) == (1, True), out

    assert array.run("cancel", "A_2") == (
        0,
        "job A_2 is cancelled; hydroslurm describe A_2 shows how it ends\n",
    )
    wait_until(lambda: array.is_cancelled(2), "it is cancelled")
    assert (array.job(0), array.job(1)) == (running, held)

    wait_until(lambda: array.run("requeue", "A_0")[0] == 0, "its status says that it saves")
    assert (array.said(0), array.said(1), array.said(2)) == (["began"], [], [])
    assert array.job(1) == held
    status, out = array.run("cancel", "--all-elements", "A_[0-1]")
    assert (status, "job A_0 is cancelled" in out, "job A_1 is cancelled" in out) == (0, True, True)
