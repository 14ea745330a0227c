"""How a job is put together, and what it refuses."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import pytest
import torch

from hydroslurm.compat.job import Job
from hydroslurm.compat.jobrunner import JobRunner
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.compat.tasks import epoch_limiter
from hydroslurm.errors import UsageError


def nothing() -> None:
    """A function of an epoch."""


def test_what_is_added_to_a_job() -> None:
    """A function may need nothing or the job; a saved object has a state and a name of its own; a
    limit is a whole number. What is wrong is refused when it is added, with the names."""

    def by_name(*, rate: float) -> None: ...
    def job_and_more(job: Job, rate: float) -> None: ...
    def with_default(job: Job, rate: float = 0.1) -> None: ...

    job = Job("things")
    for function in (nothing, with_default, print, epoch_limiter(1)):
        job.epoch(function)
    assert [part.takes_job for part in job.epoch_group.tasks()] == [False, True, False, True]
    model = job.save("model", torch.nn.Linear(1, 1))
    assert job["model"] is model
    assert job.names() == ("model",)
    for wrong, words in (
        (lambda: job.epoch(job_and_more), r"job_and_more needs job, rate; .*functools\.partial"),
        (lambda: job.epoch(by_name), "by_name needs rate"),
        (lambda: job.epoch(3), "not of int"),  # type: ignore[type-var]
        (lambda: job.save("model", model), "already registered"),
        (lambda: job.save("step", 3), "int without state_dict"),
        (lambda: job["optimizer"], r"nothing is registered as 'optimizer' in Job\('things'\); "),
        (lambda: job.run, "is not running"),
        (lambda: epoch_limiter(0), "whole number"),
        (lambda: epoch_limiter(2.0), "whole number"),  # type: ignore[arg-type]
        (lambda: epoch_limiter(True), "whole number"),
    ):
        with pytest.raises(UsageError, match=words):
            wrong()


def test_jobs_that_cannot_run() -> None:
    """No epoch, no end, or an epoch to go back to without checkpoints: refused with the remedy."""
    job = Job("empty")
    with pytest.raises(UsageError, match="no function in its epoch group"):
        JobRunner(job).run()
    job.epoch(nothing)
    with pytest.raises(UsageError, match="would never end"):
        JobRunner(job).run()
    with pytest.raises(UsageError, match="checkpoint_manager that has this epoch"):
        JobRunner(job, resume_from_epoch=3)
    with pytest.raises(UsageError, match="wanted 0 or more"):
        JobRunner(job, CheckpointManager("x"), resume_from_epoch=-1)


def test_a_running_job_refuses(tmp_path: Path) -> None:
    """While it runs it cannot be pickled, run or added to; afterwards it can, and again."""
    job = Job("busy")

    @job.build
    def build(job: Job) -> None:
        job.save("model", torch.nn.Linear(1, 1))

    @job.epoch
    def train(job: Job) -> None:
        for attempt, words in (
            (lambda: cloudpickle.dumps(job), "cannot be pickled"),
            (lambda: JobRunner(job).run(), "is already running"),
            (lambda: job.epoch(nothing), "comes too late"),
            (lambda: job.save("late", torch.nn.Linear(1, 1)), "comes too late"),
            (lambda: setattr(job, "loader", []), "comes too late"),
            (lambda: next(job.run.epoch_batches()), "needs a loader"),
            (lambda: job.run.batches(epochs=1), r"use job\.run\.epoch_batches\(\)"),
        ):
            with pytest.raises(UsageError, match=words):
                attempt()

    job.add_stop_signal(epoch_limiter(1))
    for folder in "ab":
        assert JobRunner(job, CheckpointManager(tmp_path / folder)).run() == 1
        assert job.names() == ()


def test_the_current_job_is_that_of_the_innermost_with_of_this_thread() -> None:
    """Jobs nest, other threads have their own, and outside there is none."""
    with Job("outer") as outer:
        with Job("inner") as inner:
            assert Job.current() is inner
        assert Job.current() is outer
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="no current job"):
            pool.submit(Job.current).result()
    with pytest.raises(UsageError, match="no current job"):
        Job.current()
