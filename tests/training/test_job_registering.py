"""How a job is put together, and how it is pickled."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import cloudpickle
import pytest
import torch

from hydroslurm.compat.job import Job
from hydroslurm.compat.jobrunner import JobRunner
from hydroslurm.compat.manager import CheckpointManager
from hydroslurm.compat.tasks import epoch_limiter
from hydroslurm.errors import UsageError


def nothing() -> None:
    """A function that can be pickled by its name."""


def test_the_current_job_is_that_of_the_innermost_with_of_this_thread() -> None:
    """Jobs nest, other threads have their own, and outside there is none."""
    elsewhere: list[Any] = []

    def look() -> None:
        try:
            elsewhere.append(Job.current())
        except UsageError as error:
            elsewhere.append(str(error))

    with Job("outer") as outer:
        with Job("inner") as inner:
            assert Job.current() is inner
        assert Job.current() is outer
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert "no current job" in elsewhere[0]
    with pytest.raises(UsageError, match="no current job"):
        Job.current()


def test_what_a_function_may_need() -> None:
    """Nothing or the job; more is refused when it is added, with the names."""

    def by_name(*, rate: float) -> None: ...
    def job_and_more(job: Job, rate: float) -> None: ...
    def with_default(job: Job, rate: float = 0.1) -> None: ...

    job = Job()
    for function in (nothing, with_default, print, epoch_limiter(1)):
        job.epoch(function)
    assert [part.takes_job for part in job.epoch_group.tasks()] == [False, True, False, True]
    with pytest.raises(UsageError, match=r"job_and_more needs job, rate; .*functools\.partial"):
        job.epoch(job_and_more)
    with pytest.raises(UsageError, match="by_name needs rate"):
        job.epoch(by_name)
    with pytest.raises(UsageError, match="not of int"):
        job.epoch(3)  # type: ignore[type-var]


def test_saved_objects() -> None:
    """They are returned, found by name, and refused without a state or under a name twice."""
    job = Job("things")
    model = job.save("model", torch.nn.Linear(1, 1))
    assert job["model"] is model
    assert job.names() == ("model",)
    with pytest.raises(UsageError, match="already registered"):
        job.save("model", model)
    with pytest.raises(UsageError, match="int without state_dict"):
        job.save("step", 3)
    with pytest.raises(
        UsageError, match=r"nothing is registered as 'optimizer' in Job\('things'\); "
    ):
        job["optimizer"]
    with pytest.raises(UsageError, match="is not running"):
        _ = job.run


@pytest.mark.parametrize("epochs", [0, -1, 2.0, True, "3"])
def test_epoch_limiter_wants_a_whole_number(epochs: Any) -> None:
    """Anything but 1, 2, 3 ... is refused."""
    with pytest.raises(UsageError, match="whole number"):
        epoch_limiter(epochs)


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


WITH_CLOSURES = """
import sys, cloudpickle, hydroslurm
from hydroslurm.compat.job import Job
from hydroslurm.compat.jobrunner import JobRunner
from hydroslurm.compat.tasks import epoch_limiter

with Job("closures") as job:
    seen = []

    @job.epoch
    def train(given):
        seen.append(given is job is Job.current())

    @job.exit
    def tell():
        print("seen", seen, job.run.step)

    job.add_stop_signal(epoch_limiter(2))
sys.stdout.buffer.write(cloudpickle.dumps(JobRunner(job)))
"""


def test_cloudpickle_of_a_job_in_a_script() -> None:
    """Functions of a script travel by value, and find in the other process the job that runs."""
    made = subprocess.run(
        [sys.executable, "-c", WITH_CLOSURES], capture_output=True, check=True, timeout=60
    )
    run = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read())())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", run],
        input=made.stdout,
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.decode().splitlines() == ["seen [True, True] 2", "2"]


def test_a_running_job_refuses(tmp_path: Any) -> None:
    """While it runs it cannot be pickled, run or added to; afterwards it can, and again."""
    job = Job("busy")
    said: list[str] = []

    @job.build
    def build(job: Job) -> None:
        job.save("model", torch.nn.Linear(1, 1))

    @job.epoch
    def train(job: Job) -> None:
        for attempt in (
            lambda: cloudpickle.dumps(job),
            lambda: JobRunner(job).run(),
            lambda: job.epoch(nothing),
            lambda: job.save("late", torch.nn.Linear(1, 1)),
            lambda: setattr(job, "loader", []),
            lambda: next(job.run.epoch_batches()),
            lambda: job.run.batches(epochs=1),
        ):
            with pytest.raises(UsageError) as refused:
                attempt()
            said.append(str(refused.value))

    job.add_stop_signal(epoch_limiter(1))
    for folder in "ab":
        assert JobRunner(job, CheckpointManager(tmp_path / folder)).run() == 1
        assert job.names() == ()
    assert said[:7] == said[7:]
    words = ["cannot be pickled", "is already running", *["comes too late"] * 3, "needs a loader"]
    for word, sentence in zip([*words, "use job.run.epoch_batches()"], said, strict=False):
        assert word in sentence
