"""A stop that the training does not come to: it is said where the training is, and shortly before
SIGKILL the process leaves by itself, with the reason recorded and the job requeued."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from integrations.stockjobs import StockJob
from zygote import forked

from hydroslurm.devcluster import DevCluster

SLOW_STEP = """
import time
from pathlib import Path
import torch
import hydroslurm
from hydroslurm.training import stopping

stopping.SAY_S = 0.2
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def download():
    print("waits", flush=True)
    while not Path("here").exists():
        time.sleep(0.01)

with hydroslurm.Run(model=model, optimizer=optimizer, directory="run", every_steps=0) as run:
    for step in run.steps(3):
        if step == 1:
            download()
        model(torch.ones(2)).sum().backward()
        optimizer.step()
"""


def test_a_step_that_takes_long_is_named(tmp_path: Path) -> None:
    """Outside of a job nobody kills the process: it is said where it is, and it stops at the end of
    that step."""
    with forked(SLOW_STEP, tmp_path) as program:
        program.expect("waits")
        program.signal(signal.SIGTERM)
        line = program.expect("hydroslurm: SIGTERM received 0.2 s ago, and the training has not")
        assert f"it is in download ({tmp_path}/program.py:15). It stops at the next one" in line
        (tmp_path / "here").touch()
        assert program.wait() == 75
    assert [one.name for one in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-000000002"]


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("case", "tasks"),
    [
        pytest.param("own loader --workers 2", 1, id="a loader that stalls"),
        *(
            pytest.param(case, tasks, marks=pytest.mark.long)
            for case, tasks in (
                ("own setup", 1),
                ("own compile", 1),
                ("own last", 1),
                ("lightning loader", 1),
                ("lightning loader --workers 2 --nodes 2", 2),
                ("lightning setup --nodes 2", 2),
                ("lightning sanity", 1),
                ("lightning sanity --nodes 2", 2),
                ("lightning compile", 1),
                ("lightning validation", 1),
                ("lightning save", 1),
                ("lightning last", 1),
            )
        ),
    ],
)  # fmt: skip
def test_a_training_that_hangs(
    case: str, tasks: int, requeue_cluster: DevCluster, tmp_path: Path
) -> None:
    """All ranks leave with 75 before Slurm kills them, with the reason and the place in their
    events; the attempt counts as requeued, and the next one is complete."""
    job = requeued_where_it_hangs(case, tasks, requeue_cluster, tmp_path / "job")
    said = job.output()
    assert "requeued, by hand or by a preemption; the training has not come to a safe" in said
    # srun has a line for each task, or for several that end at one moment
    left = re.findall(r"Exited with exit code (\d+)", said)
    assert set(left) == {"75"}
    assert len(left) <= tasks
    assert "Killed" not in said
    run = job.folder / "hydroslurm-runs" / job.job_id
    ends = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [one["ended"] for one in ends if "ended" in one] == ["requeued", "finished"]
    for rank in range(tasks):
        lines = (run / f"events/rank-{rank:05d}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        where = [one["data"]["message"] for one in events if one["kind"] == "agreement_failed"]
        assert [one.startswith("no safe point in ") for one in where] == [True]


@pytest.mark.slurm
@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "tasks"),
    [
        ("own test", 1),
        ("lightning between", 1),
        ("lightning test", 1),
        ("lightning predict", 1),
        ("lightning predict --nodes 2", 2),
    ],
)
def test_a_hang_behind_the_training(
    case: str, tasks: int, requeue_cluster: DevCluster, tmp_path: Path
) -> None:
    """SIGTERM ends the ranks at once. The next attempt trains none of the steps again, and repeats
    what followed them."""
    job = requeued_where_it_hangs(case, tasks, requeue_cluster, tmp_path / "job")
    said = job.output()
    assert f"attempt 2 resumes from step {12 // tasks}" in said
    assert "Killed" not in said
    run = job.folder / "hydroslurm-runs" / job.job_id
    for fit in [run, run / "fit-2"] if "between" in case else [run]:
        assert json.loads((fit / "finished.json").read_text())["step"] == 12 // tasks


def requeued_where_it_hangs(case: str, tasks: int, cluster: DevCluster, folder: Path) -> StockJob:
    """Once, by an operator; and at its end."""
    framework, place, *options = case.split()
    job = StockJob(cluster, folder, "stalling.py", framework, place, "out", *options)
    job.submit(f"--nodes={tasks}", "--ntasks-per-node=1")
    job.wait_for((job.folder / "out/hangs").exists)
    job.slurm("scontrol", "requeue", job.job_id)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert (job.folder / "out/result").exists()
    return job
