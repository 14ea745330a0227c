"""A JobRunner on a real Slurm, through the executor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import wait_until

from hydroslurm.compat.job import Job
from hydroslurm.compat.jobrunner import JobRunner
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.compat.tasks import epoch_limiter
from hydroslurm.jobs.launch.executor import Executor
from hydroslurm.slurm.client import open_client


def small_job(folder: Path, *, waits: bool) -> Job:
    """Three epochs of four steps. ``waits``: its first attempt waits in the sixth step for a stop.

    Functions within a function travel by value, also those of a module that only exists here.
    """
    with Job("small") as job:

        @job.build
        def build(job: Job) -> None:
            from torch.utils.data import DataLoader, TensorDataset

            from hydroslurm.data import ResumableSampler

            torch.manual_seed(0)
            data = TensorDataset(torch.randn(12, 4))
            model = job.save(
                "model", torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Dropout())
            )
            job.save("optimizer", torch.optim.Adam(model.parameters(), lr=0.1))
            job.loader = DataLoader(data, batch_size=3, sampler=ResumableSampler(data))

        @job.init
        def init() -> None:
            with (folder / "inits").open("a") as file:
                file.write("init\n")

        @job.epoch
        def train(job: Job) -> None:
            import time

            for (batch,) in job.run.epoch_batches():
                job["optimizer"].zero_grad()
                job["model"](batch).square().mean().backward()
                job["optimizer"].step()
                if waits and job.run.step == 5 and not (folder / "waits").exists():
                    (folder / "waits").touch()
                    while not job.run.stop_requested:
                        time.sleep(0.01)

        @job.exit
        def result(job: Job) -> None:
            torch.save([job["model"].state_dict(), job["optimizer"].state_dict()], folder / "end")

        job.add_stop_signal(epoch_limiter(3))
    return job


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


@pytest.mark.slurm
def test_requeued_in_the_middle_of_an_epoch(
    requeue_cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """scontrol requeue in an epoch: the job saves, comes back without init, goes on behind the same
    step, returns its result through submitit, and has the weights of a run left alone."""
    for name, value in requeue_cluster.environ().items():
        monkeypatch.setenv(name, value)
    alone, there = tmp_path / "alone", tmp_path / "there"
    for folder in (alone, there):
        folder.mkdir()
    assert JobRunner(small_job(alone, waits=False), CheckpointManager(alone / "run")).run() == 3

    executor = Executor(tmp_path / "runs")
    executor.update_parameters(partition="low", timeout_min=5)
    submitted = executor.submit(JobRunner(small_job(there, waits=True), CheckpointManager()))
    slurm = open_client()
    try:
        wait_until((there / "waits").exists, "it waits in step 6")
        slurm.requeue(slurm.job(int(submitted.job_id)))
        wait_until((there / "end").exists, "it ends", limit_s=120)
        assert submitted.result() == 3
    finally:
        slurm.cancel(slurm.job(int(submitted.job_id)))

    manager = CheckpointManager(submitted.run_dir.root)
    assert manager.epochs() == (0, 1, 2, 3)
    stopped = manager.find(step=6).checkpoint
    assert (stopped.kind, stopped.epoch) == ("stop", 1)
    attempts = (submitted.run_dir.root / "attempts.jsonl").read_text().splitlines()
    began = [json.loads(line) for line in attempts if "began_epoch_ns" in line]
    assert [(row["step"], row["restart_count"]) for row in began] == [(0, 0), (6, 1)]
    assert (there / "inits").read_text() == "init\n"
    assert _same(torch.load(there / "end"), torch.load(alone / "end"))
