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


CASES = {
    "own loader --workers 2": 1, "own last": 1, "lightning loader --workers 2 --nodes 2": 2,
    "lightning sanity --nodes 2": 2, "lightning last": 1,
    # behind the training SIGTERM ends the ranks at once
    "own test": 1, "lightning between": 1, "lightning test": 1, "lightning predict --nodes 2": 2,
}  # fmt: skip
"""Where it hangs -> ranks."""
FIRST, *OTHERS = CASES


@pytest.mark.slurm
@pytest.mark.parametrize(
    "case", [FIRST, *(pytest.param(one, marks=pytest.mark.long) for one in OTHERS)]
)
def test_a_training_that_hangs(case: str, requeue_cluster: DevCluster, tmp_path: Path) -> None:
    """Requeued by an operator, all ranks leave with 75 before Slurm kills them, with the reason and
    the place in their events; the attempt counts as requeued, and the next one is complete. Where
    it hangs behind the training, that trains no step again, and repeats what followed."""
    framework, place, *options = case.split()
    tasks = CASES[case]
    job = StockJob(
        requeue_cluster, tmp_path / "job", "stalling.py", framework, place, "out", *options
    )
    job.submit(f"--nodes={tasks}", "--ntasks-per-node=1")
    job.wait_for((job.folder / "out/hangs").exists)
    job.slurm("scontrol", "requeue", job.job_id)
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert (job.folder / "out/result").exists()
    said, run = job.output(), job.folder / "hydroslurm-runs" / job.job_id
    assert "Killed" not in said
    if place in ("test", "between", "predict"):
        assert f"attempt 2 resumes from step {12 // tasks}" in said
        for fit in [run, run / "fit-2"] if place == "between" else [run]:
            assert json.loads((fit / "finished.json").read_text())["step"] == 12 // tasks
        return
    assert "requeued, by hand or by a preemption; the training has not come to a safe" in said
    # srun has a line for each task, or for several that end at one moment
    assert set(re.findall(r"Exited with exit code (\d+)", said)) == {"75"}
    ends = [json.loads(line) for line in (run / "attempts.jsonl").read_text().splitlines()]
    assert [one["ended"] for one in ends if "ended" in one] == ["requeued", "finished"]
    for rank in range(tasks):
        lines = (run / f"events/rank-{rank:05d}.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        where = [one["data"]["message"] for one in events if one["kind"] == "agreement_failed"]
        assert [one.startswith("no safe point in ") for one in where] == [True]
