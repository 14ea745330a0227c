"""Functions submitted from habit: with submitit's local and debug executors and ours, and, with a
Run, to a Slurm that preempts them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit
import zygote
from clusters import Part
from processes import captured, wait_until
from submitit.slurm.slurm import SlurmJob

import hydroslurm
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RUN_DIR_ENV, RunDir
from hydroslurm.errors import UsageError
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.training.attempts import AttemptLog

sys.path.insert(0, str(Path(__file__).parent))

import submitted  # its ranks import it by this name too

HERE = Path(__file__).parent
LIMIT_S = 180.0


def whereabouts(given: int) -> list[Any]:
    """What a function sees of the run that it belongs to."""
    names = (RUN_DIR_ENV, "WORLD_SIZE", "RANK")
    installed = hydroslurm.is_installed()
    return [given, installed, *(os.environ.get(name) for name in names)]


@pytest.fixture
def led_here(requeue_cluster: Part, monkeypatch: pytest.MonkeyPatch) -> Part:
    """This process submits to the cluster. submitit's watcher belongs to its class: it would ask
    this cluster's sacct for the jobs of another."""
    for name, value in requeue_cluster.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    monkeypatch.setattr(SlurmJob, "watcher", type(SlurmJob.watcher)())
    return requeue_cluster


@pytest.mark.slurm
@pytest.mark.parametrize("stock", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_submitted_function_outlives_its_preemptions(
    stock: bool, led_here: Part, tmp_path: Path
) -> None:
    """An urgent job, then submitit's warning signal followed by two SIGTERMs, each cost one attempt
    and no step; ``job.result()`` is what the function returns when it is left alone."""
    node = led_here.nodes[0]
    job: submitit.Job[dict[str, Any]]
    if stock:
        executor = submitit.AutoExecutor(tmp_path / "logs", cluster="slurm")
        executor.update_parameters(slurm_partition="low", slurm_nodelist=node, timeout_min=5)
        job = executor.submit(hydroslurm.preemptible(submitted.train), tmp_path)
        run = RunDir(tmp_path / "logs" / f"{job.job_id}_run")
    else:
        ours = Executor(tmp_path / "%j", 3)
        ours.update_parameters(partition="low", nodelist=node, timeout_min=5)
        job = ours.submit(submitted.train, tmp_path)
        assert isinstance(job, PausableJob)
        run = job.run_dir
        assert (tmp_path / job.job_id).resolve() == run.logs
    assert isinstance(job, SlurmJob)
    path = run.rank_events(0)

    def wait_for(kind: EventKind, attempt: int) -> None:
        def seen() -> bool:
            events = read_events(path) if path.exists() else ()
            return any(e.kind is kind and e.restart_count == attempt - 1 for e in events)

        wait_until(seen, f"{kind.value} of attempt {attempt}", limit_s=LIMIT_S)

    try:
        wait_for(EventKind.FIRST_STEP, 1)
        urgent = ["srun", "-p", "urgent", "-w", node, "--exclusive", "-t1", "true"]
        subprocess.run(urgent, check=True, timeout=LIMIT_S)
        wait_for(EventKind.FIRST_STEP, 2)
        job._interrupt(timeout=True)
        # Slurm sends signals without an order between them, and none may reach the next attempt
        wait_for(EventKind.STOP_REQUESTED, 2)
        term = ["scancel", "--signal=TERM", job.job_id]
        for sent in [subprocess.Popen(term, stderr=subprocess.DEVNULL) for _ in range(2)]:
            sent.wait(60)
        wait_for(EventKind.FIRST_STEP, 3)
        (tmp_path / "hurry").touch()
        (tmp_path / "alone").mkdir()
        alone = zygote.ran([submitted.__file__, tmp_path / "alone"])
        assert job.result() == json.loads(alone.stdout.splitlines()[-1])
    finally:
        job.cancel(check=False)
    attempts = AttemptLog(run.attempts_jsonl).attempts()
    # the warning is submitit's imitation, five minutes before the limit: for Slurm a user's signal
    assert [attempt.ending for attempt in attempts] == ["preempted", "asked", "finished"]
    assert [new.step for new in attempts[1:]] == [old.end_step for old in attempts[:-1]]
    seen = Counter((event.restart_count, event.kind) for event in read_events(path))
    for restart in (0, 1):  # submitit's own handlers would save, and requeue, once more per signal
        for kind in (EventKind.SAFE_POINT, EventKind.SAVE_COMMITTED, EventKind.REQUEUED):
            assert seen[restart, kind] == 1, (restart, kind)
    assert "Caught signal" not in (job.stderr() or "") + (job.stdout() or "")


@pytest.mark.long
def test_submitits_own_tests_with_our_executor(tmp_path: Path) -> None:
    """All of those of Slurm and of AutoExecutor pass, but for the few that are known to differ.
    They run in a copy of submitit, because one of them writes beside itself."""
    package = tmp_path / "submitit"
    shutil.copytree(Path(submitit.__file__).parent, package)
    paths = [str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")]
    options = ["-p", "submitit_plugin", "-p", "no:cacheprovider", "-rfEx", "--tb=short", "-q"]
    tests = [str(package / test) for test in ("slurm/test_slurm.py", "auto/test_auto.py")]
    done = captured(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 xfailed" in done.stdout


@pytest.mark.filterwarnings(  # submitit's debug executor leaves its log files open
    "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_debug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``cluster="debug"`` a function runs in this process, which stays as it was, also when
    its run has finished there before."""
    for name in (RUN_DIR_ENV, "SLURM_JOB_ID", "SUBMITIT_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "hurry").touch()
    stock = submitit.AutoExecutor(tmp_path / "logs", cluster="debug")
    job = stock.submit(hydroslurm.preemptible(submitted.train), tmp_path)
    assert job.result()["steps"] == submitted.STEPS
    again = stock.submit(hydroslurm.preemptible(submitted.train), tmp_path)
    assert "this process has already finished a Run in" in str(again.exception())
    seen = stock.submit(hydroslurm.preemptible(whereabouts), 3).result()
    assert seen[:2] == [3, False]
    assert not Path(seen[2]).exists()

    ours = Executor(tmp_path / "ours" / "%j", cluster="debug")
    ours.update_parameters(name="find me", partition="low", slurm_array_parallelism=2, nodes=1)
    jobs = ours.map_array(whereabouts, [1, 2])
    for number, job in enumerate(jobs, 1):
        assert job.result() == [number, True, str(job.run_dir.root), None, None]
        assert (tmp_path / "ours" / job.job_id).resolve() == job.run_dir.logs
        assert "find-me" in job.run_dir.root.name
    assert RUN_DIR_ENV not in os.environ
    assert not hydroslurm.is_installed()
    with pytest.raises(UsageError, match='wanted "slurm", "local" or "debug"'):
        Executor(tmp_path, cluster="cloud")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"executor\.submit"):
        hydroslurm.preemptible(3)  # type: ignore[arg-type]


def test_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``cluster="local"`` each task is a rank. A Run that is warned saves, submitit starts it
    again, and ``result()`` is that of all its attempts."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *sys.path]))
    ours = Executor(tmp_path / "ours", 3, cluster="local")
    ours.update_parameters(timeout_min=5, tasks_per_node=2, local_setup=["true"])
    ranks = ours.submit(whereabouts, 7)
    stock = submitit.AutoExecutor(tmp_path / "logs", cluster="local")
    stock.update_parameters(timeout_min=5)
    job = stock.submit(hydroslurm.preemptible(submitted.train), tmp_path)
    events = RunDir(tmp_path / "logs" / f"{job.job_id}_run").rank_events(0)

    def attempts() -> int:
        assert job.state == "RUNNING", job.stderr()
        steps = [] if not events.exists() else list(read_events(events))
        return sum(event.kind is EventKind.FIRST_STEP for event in steps)

    wait_until(lambda: attempts() == 1, "first attempt", limit_s=100)
    (task,) = Path(f"/proc/{job.job_id}/task/{job.job_id}/children").read_text().split()
    os.kill(int(task), signal.SIGUSR2)
    wait_until(lambda: attempts() == 2, "second attempt", limit_s=100)
    (tmp_path / "hurry").touch()
    assert job.result()["steps"] == submitted.STEPS
    told = (tmp_path / "run" / "attempts.jsonl").read_text().splitlines()
    ended = [json.loads(line) for line in told]
    assert [one["ended"] for one in ended if "ended" in one] == ["asked", "finished"]
    folder = str(ranks.run_dir.root)
    assert ranks.results() == [[7, True, folder, "2", str(rank)] for rank in range(2)]


def test_interrupt_means_stop_and_not_resume(programs: Callable[..., Path], tmp_path: Path) -> None:
    """Where submitit sends its USR2, which ends a pause here, our job sends the warning."""
    said = programs(scancel='echo "$@" >> "$0.said"') / "scancel.said"
    job: PausableJob = PausableJob(folder=tmp_path, job_id="12")
    job._interrupt()
    job._interrupt(timeout=True)
    asked = ["12 --signal TERM", "12 --signal URG", "12 --signal URG"]
    assert said.read_text().splitlines() == asked


SACCT = """#!/bin/sh
# A sacct of two clusters: job 1 has ended on the one whose configuration is called "old", and runs
# on every other one.
case "$SLURM_CONF" in
    */old/slurm.conf) state=COMPLETED ;;
    *) state=RUNNING ;;
esac
printf 'JobID|State|NodeList\\n1|%s|n1\\n' "$state"
"""


def test_each_job_is_looked_up_in_its_own_slurm(
    programs: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Job 1 of the new cluster runs, although job 1 of the old one has ended, and the old one's
    has ended, although ``SLURM_CONF`` names the new cluster by now. One sacct asks for all jobs of
    a Slurm, also where no configuration is named."""
    programs(sacct=SACCT)
    jobs = {}
    for name in ("old", "new"):
        monkeypatch.setenv("SLURM_CONF", str(tmp_path / name / "slurm.conf"))
        jobs[name] = PausableJob(folder=tmp_path / name, job_id="1")
        assert jobs[name].state == ("COMPLETED" if name == "old" else "RUNNING")
    assert jobs["old"].watcher.is_done("1")
    assert jobs["old"].state == "COMPLETED"
    assert not jobs["new"].watcher.is_done("1")
    for _ in range(2):
        one, two = (PausableJob(folder=tmp_path, job_id=number) for number in "12")
        assert one.watcher is two.watcher
        monkeypatch.delenv("SLURM_CONF", raising=False)
