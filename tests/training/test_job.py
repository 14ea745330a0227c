"""Caffe2's spelling of a job: what it is made of, a client that runs it, its order of things, and
its checkpoints."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch.utils.data import DataLoader

from hydroslurm import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Run,
    Task,
    TaskGroup,
    epoch_limiter,
)
from hydroslurm.errors import CheckpointMissing, RunFolderError, UsageError


class Total:
    """Something that is saved; ``total`` is 100 after init, and grows by the epoch."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, int]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.total = state["total"]


class Client:
    """Runs what it is given, and remembers the names."""

    def __init__(self) -> None:
        self.ran: list[str] = []

    def run(self, runnable: Any) -> None:
        self.ran.append(runnable.name)
        runnable()


def counting() -> tuple[Job, Total, torch.Tensor]:
    """A job in Caffe2's words, its state, and its stop signal: a tensor, true from epoch 3 on."""
    total, finished = Total(), torch.zeros(1, dtype=torch.bool)
    with Job() as job:
        Job.current().save("total", total)
        with Job.current().init_group:

            def fill() -> None:
                total.total = 100

            Task(step=fill, node="trainer:0")

        def add() -> int:
            total.total += 1 + job.run.epoch
            finished[0] = job.run.epoch >= 2
            return total.total

        Task(step=add)
        with Job.current().exit_group:
            Task(step=lambda: None, node="trainer:1")
        job.add_stop_signal(finished)
    return job, total, finished


def test_the_order_of_things(tmp_path: Path) -> None:
    """From scratch init, manager.init, save(0); on a resume manager.init, load; then each epoch
    before its signals, its save before the end, and exit. A finished job trains one more epoch."""
    job, total, _ = counting()
    assert job.compile(LocalSession) is job
    assert job.nodes_to_checkpoint() == ("trainer:0",)
    manager, client = CheckpointManager(tmp_path, "minidb"), Client()
    assert JobRunner(job, manager)(client) == 3
    assert " ".join(client.ran) == (
        "init init(trainer:0) save(0) epoch save(1) epoch save(2) epoch save(3) exit"
    )
    assert manager.blob_list() == ("total",)

    for epoch, totals in enumerate((100, 101, 103, 106)):
        LocalSession().run(manager.load(epoch))
        assert total.total == totals
    for epoch, last, steps in ((1, 3, "epoch save(2) epoch save(3)"), (3, 4, "epoch save(4)")):
        total.total, client = 0, Client()
        again = MultiNodeCheckpointManager(tmp_path, "minidb")
        assert JobRunner(job, again, epoch)(client) == last
        assert " ".join(client.ran) == f"init(trainer:0) load({epoch}) {steps} exit"
        assert (total.total, again.blob_list()) == (100 + last * (last + 1) // 2, ("total",))
    with pytest.raises(UsageError, match="int has no run"):
        JobRunner(job, manager)(3)  # type: ignore[arg-type]


def test_what_is_run_by_hand(tmp_path: Path) -> None:
    """Groups, and the manager's init and load; saves are a JobRunner's. One manager takes one node,
    the other as many as there are."""
    job, total, _ = counting()
    manager, session = CheckpointManager(tmp_path), LocalSession()
    with pytest.raises(UsageError, match=r"init\(a, b\): wanted one node; .*MultiNodeCheckpointM"):
        manager.init(["a", "b"])
    MultiNodeCheckpointManager(tmp_path).init(["a", "b"])
    with pytest.raises(UsageError, match=r"after client\.run\(manager\.init"):
        manager.blob_list()
    session.run(job.init_group)
    assert total.total == 100
    with job, pytest.raises(UsageError, match="is not running; JobRunner"):
        session.run(manager.save(0))
    assert JobRunner(job, manager)(session) == 3
    by_hand = CheckpointManager(tmp_path)
    with pytest.raises(UsageError, match=r"run client\.run\(manager\.init"):
        session.run(by_hand.load(0))
    with job:
        session.run(by_hand.init(job.nodes_to_checkpoint()))
    session.run(by_hand.load(1))
    assert total.total == 101


def test_what_ends_a_job() -> None:
    """A limiter adds itself, once. An output that is no signal need not be true or false."""
    epochs: list[int] = []
    with Job(epoch_group=TaskGroup("mine")) as job:
        limit = epoch_limiter(2)
        Task(step=lambda: epochs.append(job.run.epoch))
        (drawn,) = Task(step=lambda: torch.zeros(2)).outputs()
    assert job.epoch_group.name == "mine"
    assert JobRunner(job)(LocalSession()) == 2
    assert (epochs, drawn.fetch().tolist()) == ([0, 1], [0, 0])
    assert job.add_stop_signal(limit) is limit


def test_later_versions(tmp_path: Path) -> None:
    """download_group runs once, after the epochs and before exit; train(), epoch_limiter(job, n)
    and stop conditions are what they are called there."""
    ran: list[str] = []
    with Job(stop_conditions=[]) as job:
        Task(step=lambda: ran.append("epoch") or len(ran) > 2)  # type: ignore[func-returns-value]
        for group in (job.init_group, job.download_group, job.exit_group):
            with group:
                Task(step=lambda name=group.name: ran.append(name))
        job.add_stop_condition(job.epoch_group.tasks()[0].outputs()[0])
        job.add_stop_condition(lambda: False)
    epoch_limiter(job, 5)
    assert JobRunner(job, CheckpointManager(tmp_path)).train(LocalSession()) == 2
    assert ran == ["init", "epoch", "epoch", "download_group", "exit"]
    assert [signal.fetch() for signal in job.stop_signals[:2]] == [True, False]
    assert job.stop_conditions[0] is job.epoch_group.tasks()[0].outputs()[0]


def test_two_jobs_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second job would get what the first has trained: it needs a directory of its own, and has
    one without a manager. The same job gets its own. A job that fails leaves no run open."""
    failing, _, _ = counting()
    failing.init(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        JobRunner(failing, CheckpointManager(tmp_path / "failed")).run()
    job, total, _ = counting()
    assert JobRunner(job, CheckpointManager(tmp_path / "run")).run() == 3
    other, _, _ = counting()
    other.init(lambda: None)
    with pytest.raises(UsageError, match=r"another job in .*CheckpointManager\(.*run/second"):
        JobRunner(other, CheckpointManager(tmp_path / "run")).run()
    again, total, _ = counting()
    assert JobRunner(again, CheckpointManager(tmp_path / "run")).run() == 3
    assert total.total == 106
    monkeypatch.setenv("HYDROSLURM_RUN_DIR", str(tmp_path / "job"))
    for job, total, _ in (counting(), counting()):
        assert (JobRunner(job).run(), total.total) == (3, 106)


def test_an_unusable_folder(tmp_path: Path) -> None:
    """The error is about the folder, not about a file in it that is not there."""
    (tmp_path / "file").touch()
    job, _, _ = counting()
    for folder in ("file/run", "file"):
        with pytest.raises(RunFolderError, match=rf"run folder [^ ]*{folder}: [^ ]*file is a file"):
            JobRunner(job, CheckpointManager(tmp_path / folder)).run()


def test_a_compiled_job_travels(tmp_path: Path) -> None:
    """By plain pickle and by cloudpickle: its functions are closures that share their state with
    what it saves, in another process as here."""
    job, _, _ = counting()
    job.exit(lambda job: print("total", job["total"].total, job is Job.current()))
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(job)
    job.compile(LocalSession)
    run = "import pickle, sys; from hydroslurm import LocalSession\n"
    run += "for _ in range(2): print(pickle.load(sys.stdin.buffer)(LocalSession()))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", run],
        input=b"".join(
            dumps(JobRunner(job, CheckpointManager(tmp_path / dumps.__module__)))
            for dumps in (pickle.dumps, cloudpickle.dumps)
        ),
        capture_output=True,
        timeout=100,
        cwd=Path(__file__).parent,
    )
    assert done.stdout.decode().splitlines() == ["total 106 True", "3"] * 2, done.stderr.decode()


def test_a_folder_in_use_does_not_end_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a manager it has a temporary one, into which a thread may still write."""
    late: list[Path] = []
    remove = os.rmdir

    def removed_too_soon(path: Any, **more: Any) -> None:
        if Path(path).is_absolute():
            late.append(Path(path, "late"))
            late[-1].touch()
        remove(path, **more)

    job, _, _ = counting()
    monkeypatch.setattr(os, "rmdir", removed_too_soon)
    assert JobRunner(job).run() == 3
    assert late


# --- how it is put together, and what it refuses
# ------------------------------------------------------------------------------------------------


def nothing() -> None:
    """A function of an epoch."""


def test_what_is_added_to_a_job() -> None:
    """A function may need nothing or the job; a saved object has a state and a name of its own; a
    limit is a whole number, a stop signal true or false. What is wrong is refused when it is added,
    with the names; a job without an epoch or an end, or without checkpoints to go back to, when it
    runs, with the remedy."""

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
        *(
            (lambda signal=signal: job.add_stop_signal(signal), "add_stop_signal.*wanted a functi")
            for signal in ([False], torch.zeros(2), "no")
        ),
        (lambda: Task(step=nothing).outputs()[0].fetch(), "nothing has not run"),
        (lambda: JobRunner(Job("empty")).run(), "no function in its epoch group"),
        (lambda: JobRunner(job).run(), "would never end"),
        (lambda: JobRunner(job, resume_from_epoch=3), "checkpoint_manager that has this epoch"),
        (lambda: JobRunner(job, CheckpointManager("x"), -1), "wanted 0 or more"),
        (lambda: CheckpointManager(keep=0), "keep=0"),
        (lambda: CheckpointManager(on_save_error="no"), "on_save_error='no'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=words):
            wrong()


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
    """Jobs nest, other threads have their own, and outside there is none. A task that a function
    of a job makes belongs to no group, whatever is open around the session that runs it."""
    with Job("outer") as outer:
        with Job("inner") as inner:
            assert Job.current() is inner
        assert Job.current() is outer
        inner.init(lambda job: Task(step=nothing) if Job.current() is job else None)
        LocalSession().run(inner.init_group)
        assert outer.epoch_group.tasks() == inner.epoch_group.tasks() == ()
        with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="no current job"):
            pool.submit(Job.current).result()
    with pytest.raises(UsageError, match="no current job"):
        Job.current()


# --- its checkpoints
# ------------------------------------------------------------------------------------------------


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
    found = manager.find(epoch=2)
    assert (manager.epochs(), found.step) == ((0, 1, 2), 2)
    (found.path / "part-00000.json").write_text("{}")
    assert [manager.cp_accessible(epoch) for epoch in range(4)] == [True, True, False, False]


def test_of_a_run_without_a_job(tmp_path: Path) -> None:
    """The checkpoints of a plain Run are read in the same way."""
    with Run(model=torch.nn.Linear(2, 1), directory=tmp_path) as run:
        run.resume()
        run.step = 7
        run.save()
        manager = CheckpointManager(run)
    assert (manager.epochs(), manager.last_epoch()) == ((), None)
    assert list(manager.load(step=7).shared) == ["model"]


def test_no_directory_outside_of_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without one, the run folder of the job is meant; outside of a job that is an error."""
    for name in ("SLURM_JOB_ID", "HYDROSLURM_RUN_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match=r'CheckpointManager\("runs/my-run"\)'):
        _ = CheckpointManager().directory
    monkeypatch.setenv("HYDROSLURM_RUN_DIR", str(tmp_path))
    assert CheckpointManager().directory == tmp_path
