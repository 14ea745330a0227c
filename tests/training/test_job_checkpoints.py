"""CheckpointManager as a reader: which checkpoints there are, and what is in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from hydroslurm.compat.job import Job
from hydroslurm.compat.jobrunner import JobRunner
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.compat.tasks import epoch_limiter
from hydroslurm.errors import CheckpointMissing, UsageError


def _weight(state: object) -> float:
    return state["weight"][0, 0].item()  # type: ignore[index]


def test_which_there_are_and_what_is_in_them(tmp_path: Path) -> None:
    """Of two epochs of two steps, each of which adds one to a weight, and of one that does not; a
    periodic save at step 4 lies within the second one."""
    manager = CheckpointManager(tmp_path, every_steps=4)
    job = Job("count")

    @job.build
    def build(job: Job) -> None:
        torch.nn.init.zeros_(job.save("model", torch.nn.Linear(2, 1)).weight)
        job.loader = DataLoader(torch.zeros(4), batch_size=2)

    @job.epoch
    def train(job: Job) -> None:
        for _ in job.run.epoch_batches():
            with torch.no_grad():
                job["model"].weight.add_(1)

    @job.epoch
    def leave_early(job: Job) -> None:
        for _ in job.run.epoch_batches():
            break

    job.add_stop_signal(epoch_limiter(2))
    assert JobRunner(job, manager).run() == 2
    assert manager.epochs() == (0, 1, 2)
    assert manager.last_epoch() == 2
    assert manager.last_epoch(user_epoch=1) == 1
    with pytest.raises(CheckpointMissing, match=r"epoch 5 .* epochs 0, 1, 2, and steps 0, 3, 4, 6"):
        manager.last_epoch(user_epoch=5)
    with pytest.raises(UsageError, match="chosen by one of them"):
        manager.find(epoch=1, step=2)
    assert [_weight(manager.load(epoch=n).shared["model"]) for n in (0, 1, 2)] == [0, 2, 4]
    assert _weight(manager.load(step=4).shared["model"]) == 3
    assert _weight(manager.load().shared["model"]) == 4
    with pytest.raises(CheckpointMissing, match="of step 1 "):
        manager.load(step=1)


def test_epochs_without_steps_and_a_damaged_one(tmp_path: Path) -> None:
    """An epoch that makes no step counts as one, so that each has its checkpoint; cp_accessible
    reads what it vouches for."""
    job = Job()
    job.epoch(lambda: None)
    job.add_stop_signal(epoch_limiter(2))
    manager = CheckpointManager(tmp_path)
    JobRunner(job, manager).run()
    found = manager.find(epoch=2).checkpoint
    assert (manager.epochs(), found.step) == ((0, 1, 2), 2)
    (found.path / "part-00000.json").write_text("{}")
    assert [manager.cp_accessible(epoch) for epoch in range(4)] == [True, True, False, False]


def test_no_directory_outside_of_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without one, the run folder of the job is meant; outside of a job that is an error."""
    for name in ("SLURM_JOB_ID", "HYDROSLURM_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r'CheckpointManager\("runs/my-run"\)'):
        _ = CheckpointManager().directory
    monkeypatch.setenv("HYDROSLURM_RUN_DIR", str(tmp_path))
    assert CheckpointManager().directory == tmp_path
    with pytest.raises(UsageError, match="keep=0"):
        CheckpointManager(keep=0)
