"""Jobs on a real Slurm: submitted through submitit, suspended, resumed, preempted, looked at."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import captured, is_stopped, wait_until

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.errors import LaunchError, NotPermitted, TargetError, UsageError
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.jobs.plan import read_submission
from hydroslurm.jobs.requests import pause_job, requeue_job, resume_job
from hydroslurm.observe.job import JobView
from hydroslurm.observe.training import ranks_dir_of
from hydroslurm.slurm.client import JobState, SlurmClient, open_client

pytestmark = pytest.mark.slurm

# an ordinary training script: not a word of hydroslurm in it
SCRIPT = """
import os, pathlib, sys, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 32)
stop = pathlib.Path(sys.argv[1])
step = 0
while not stop.exists():
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
    step += 1
    if step == 3:
        stop.with_name("trains-" + os.environ["SLURM_PROCID"]).touch()
print("done", step > 0)
"""
LISTENS = SCRIPT.replace("import torch\n", "import torch, hydroslurm\nhydroslurm.install()\n", 1)


@pytest.fixture
def on_cluster(pause_cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process talks to the dev cluster."""
    for name, value in pause_cluster.environ().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def slurm(on_cluster: None) -> SlurmClient:
    return open_client()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def _state(run: RunDir, rank: int = 0) -> str:
    found = read_status(run.rank_status(rank))
    return found.state if found else "absent"


def _trains(folder: Path, ranks: int = 1) -> None:
    """Until steps are made: before that a rank may be busy importing for longer than the grace."""
    for rank in range(ranks):
        wait_until((folder / f"trains-{rank}").exists, f"rank {rank} makes steps")


def test_an_unmodified_script_is_suspended_and_resumed(slurm: SlurmClient, folder: Path) -> None:
    """scontrol suspend parks its two ranks before Slurm's SIGSTOP, and resume continues them. A
    pause that comes while an earlier suspend and resume are under way is not lost. After scancel
    --signal=KILL the status says killed, though the ranks wrote nothing of it."""
    executor = Executor(folder / "runs")
    executor.update_parameters(partition="low", timeout_min=5, nodes=2, tasks_per_node=1)
    submitted = executor.submit_script(str(folder / "train.py"), str(folder / "stop"))
    run, number = submitted.run_dir, int(submitted.job_id)
    assert PausableJob(folder / "runs", submitted.job_id).run_dir == run
    _trains(folder, ranks=2)

    written, script = read_submission(run.root), run.job_sbatch.read_text()
    assert (written.job_id, "train.py" in written.command) == (submitted.job_id, True)
    assert "--signal=URG@90" in script
    assert "export SUBMITIT_PREEMPT_SIGNAL=URG" in script  # submitit's is out of the way
    job = slurm.job(number)
    assert ranks_dir_of(job) == run

    slurm.suspend(job)
    wait_until(lambda: _state(run) == "parked", "parked")
    slurm.resume(job)
    time.sleep(0.5)  # slurmd looks once a second whether the suspend is over
    paused = pause_job(slurm, slurm.job(number))
    assert paused.how == "scontrol suspend"
    assert [(answer.rank, answer.done) for answer in paused.answers] == [(0, True), (1, True)]
    job = slurm.job(number)
    assert job.state is JobState.SUSPENDED
    ranks = JobView(run, job).ranks
    assert [(rank.state, "slurm" in rank.causes) for rank in ranks] == [("parked", True)] * 2
    assert len({rank.pid for rank in ranks}) == 2
    wait_until(
        lambda: submitted.get_info(mode="force").get("State") == "SUSPENDED",
        "sacct says that it is suspended",
    )
    assert not submitted.done(force_check=True)
    wait_until(lambda: is_stopped(ranks[0].pid), "Slurm's SIGSTOP after its grace")
    resumed = resume_job(slurm, job)
    assert resumed.how == "scontrol resume"
    assert [answer.done for answer in resumed.answers] == [True, True]

    slurm.signal(slurm.job(number), "KILL")
    wait_until(lambda: slurm.job(number).state.has_ended, "Slurm has seen its end")
    ranks = JobView(run, slurm.job(number)).ranks
    assert [rank.state for rank in ranks] == ["killed", "killed"]


@contextlib.contextmanager
def _sbatch(slurm: SlurmClient, folder: Path, wrap: str, *options: str) -> Iterator[int]:
    """A job in this folder, cancelled in the end."""
    words = ["sbatch", "--parsable", "-p", "low", "-o", "out", *options, "--wrap", wrap]
    done = subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=60)
    job_id = int(done.stdout)
    try:
        yield job_id
    finally:
        slurm.cancel(slurm.job(job_id))


HELPER = "srun --overlap -n1 bash -c 'touch helper; exec sleep 300' & "


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (HELPER + "srun --overlap -n1 {train}", ""),
        ("srun -n1 bash -c '{train}; true'", "would kill bash"),
        pytest.param(
            HELPER + "srun --overlap -n1 {python} -m hydroslurm.cli agent -- {script}",
            "",
            marks=pytest.mark.long,
        ),
    ],
    ids=["beside a helper", "below a shell", "agent"],
)
def test_a_pause_by_signal_touches_only_ranks_that_take_it(
    slurm: SlurmClient, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, reason: str
) -> None:
    """Where scontrol suspend is refused the ranks get SIGUSR1, which kills who does not know it: a
    step without ranks never gets it, one in which it would do harm is left alone, and the reason is
    said. resume finds the way back."""

    def refuse(job_id: int) -> None:
        raise NotPermitted("only operators")

    (folder / "listens.py").write_text(LISTENS)
    script = f"listens.py {folder / 'stop'}"
    train = f"{sys.executable} {script}"
    wrapped = command.format(train=train, script=script, python=sys.executable)
    with _sbatch(slurm, folder, wrapped, "-n2", "-N1", "--no-requeue") as job_id:
        _trains(folder)
        run = RunDir(folder / "hydroslurm-runs" / str(job_id))
        monkeypatch.setattr(slurm, "suspend", refuse)
        if reason:
            with pytest.raises(TargetError, match=reason):
                pause_job(slurm, slurm.job(job_id))
            seen = {event.kind for event in read_events(run.rank_events(0))}
            assert EventKind.SIGNAL_RECEIVED not in seen
        else:
            wait_until((folder / "helper").exists, "the helper runs")
            paused = pause_job(slurm, slurm.job(job_id))
            assert [answer.done for answer in paused.answers] == [True]
            assert all(word in paused.how for word in ("USR1", "only operators", f" {job_id}."))
            assert _state(run) == "parked"
            resumed = resume_job(slurm, slurm.job(job_id))
            assert "USR2" in resumed.how
            assert resumed.answers[0].done
            steps = subprocess.run(
                ["squeue", "--steps", "-h", "-j", str(job_id)], capture_output=True, text=True
            ).stdout
            assert "bash" in steps
        assert slurm.job(job_id).state is JobState.RUNNING


TWO_CALLS = """
import pathlib, sys, time, torch, hydroslurm
saved = pathlib.Path(sys.argv[1])
hydroslurm.receive_suspend_command()
saved.with_name("ready").touch()
while not hydroslurm.receive_suspend_command():
    time.sleep(0.01)
saved.touch()
hydroslurm.go_suspend()
"""


def test_requeue_of_a_job_that_saves_in_its_own_way(slurm: SlurmClient, folder: Path) -> None:
    """hydroslurm requeue accepts a job of the two calls: it saves, leaves and is queued again."""
    (folder / "own.py").write_text(TWO_CALLS)
    train = f"srun {sys.executable} own.py {folder / 'saved'}"
    with _sbatch(slurm, folder, train, "-n1", "--requeue") as job_id:
        wait_until((folder / "ready").exists, "it listens")
        answer = requeue_job(slurm, slurm.job(job_id))
        assert [one.done for one in answer.answers] == [True]
        assert "saved in its own way; requeued" in answer.answers[0].message
        assert (folder / "saved").exists()


def test_callables_and_arrays(on_cluster: None, folder: Path) -> None:
    """Each callable's value comes back, and each task of an array is pausable and has its own
    folder."""
    executor = Executor(folder / "runs")
    executor.update_parameters(slurm_partition="low", timeout_min=5)
    jobs = executor.map_array(pow, [2, 3], [3, 2])
    assert [job.result() for job in jobs] == [8, 9]
    for index, job in enumerate(jobs):
        kinds = [e.kind for e in read_events(job.run_dir.rank_events(0))]
        assert (kinds[0], kinds[-1]) == (EventKind.INSTALLED, EventKind.UNINSTALLED)
        assert job.run_dir.root.name == str(index)


def test_what_cannot_be_submitted_is_explained(on_cluster: None, folder: Path) -> None:
    """Unknown parameters and scripts give errors that name them, and leave no run folder. What
    sbatch says of a partition that is not there stands in one line, with those that are there and,
    for a queue of T9k's, where it is mapped to one. A spec is as a script."""
    executor = Executor(folder / "runs")
    for words, wrong in (
        ({"partitionn": "low"}, "partitionn"),
        ({"use_srun": False}, "use_srun"),
        ({"comment": "mine"}, "set by hydroslurm"),
    ):
        with pytest.raises(UsageError, match=wrong):
            executor.update_parameters(**words)
    with pytest.raises(UsageError, match=r"nothing\.py"):
        executor.submit_script(str(folder / "nothing.py"))
    executor.update_parameters(partition="nowhere")
    with pytest.raises(LaunchError, match="nowhere"):
        executor.submit_script(str(folder / "train.py"))
    spec = "replicaSpecs: [{template: {command: ['true']}}]\nscheduler: {partition: nowhere}\n"
    (folder / "job.yaml").write_text(spec)
    for words in (["-p", "nowhere", "train.py"], ["job.yaml"]):
        done = hydroslurm_submit(folder, *words)
        assert (done.returncode, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert done.stderr.count("Invalid partition name") == 1
        assert re.search(r"The partitions here are \w+(, \w+)*; for a queue of a T9k", done.stderr)
    executor.update_parameters(partition="low", nodes=999)
    with pytest.raises(LaunchError, match=r"could never start \(Partition.*asked for 999 nodes of"):
        executor.submit_script(str(folder / "train.py"))
    (folder / "job.yaml").write_text(
        spec.replace("{template", "{replicas: 999, template").replace("nowhere", "low")
    )
    done = hydroslurm_submit(folder, "job.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert "could never start (Partition" in done.stderr
    assert not (folder / "runs").exists()


def hydroslurm_submit(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [sys.executable, "-m", "hydroslurm.cli", "submit", "--folder", "runs", *words],
        cwd=folder,
        timeout=120,
    )


def test_a_job_without_hydroslurm_is_left_alone(slurm: SlurmClient, folder: Path) -> None:
    """pause_job of a job in which nothing is installed says so and does not suspend it."""
    with _sbatch(slurm, folder, "srun sleep 60") as job_id:
        wait_until(lambda: slurm.job(job_id).state is JobState.RUNNING, "it runs")
        with pytest.raises(TargetError, match="left alone"):
            pause_job(slurm, slurm.job(job_id))
        assert slurm.job(job_id).state is JobState.RUNNING
