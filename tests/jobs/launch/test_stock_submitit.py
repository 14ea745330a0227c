"""A function with a Run, submitted with submitit's own executor or with ours, and preempted: two
jobs side by side, for nearly all of the time is Slurm's own waiting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import submitit
from clusters import Part
from processes import wait_until
from stories import Stories, stories
from submitit.slurm.slurm import SlurmJob

import hydroslurm
from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.training.attempts import AttemptLog

sys.path.insert(0, str(Path(__file__).parent))

import submitted  # its ranks import it by this name too

LIMIT_S = 180.0


@dataclass
class Submitted:
    """One job."""

    job: submitit.Job[dict[str, Any]]
    run: RunDir
    folder: Path
    node: str

    def events(self) -> list[Event]:
        path = self.run.rank_events(0)
        return list(read_events(path)) if path.exists() else []

    def wait_for_attempt(self, number: int) -> None:
        """Until this attempt has made a step."""
        self._wait_for(EventKind.FIRST_STEP, number)

    def wait_for_signal(self, number: int) -> None:
        """Until this attempt has received one that is to stop it."""
        self._wait_for(EventKind.STOP_REQUESTED, number)

    def _wait_for(self, kind: EventKind, number: int) -> None:
        def seen() -> bool:
            return any(e.kind is kind and e.restart_count == number - 1 for e in self.events())

        wait_until(seen, f"{kind.value} of attempt {number} on {self.node}", limit_s=LIMIT_S)

    def send(self, signal: str) -> subprocess.Popen[bytes]:
        """As Slurm does, and a person with scancel. A job that has left meanwhile cannot be
        signalled."""
        command = ["scancel", f"--signal={signal}", self.job.job_id]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def led_here(requeue_cluster: Part) -> Iterator[None]:
    """This process submits to the cluster. submitit's watcher belongs to its class: it would ask
    this cluster's sacct for the jobs of another."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in requeue_cluster.environ().items():
            patched.setenv(name, value)
        paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
        patched.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        SlurmJob.watcher.clear()
        yield
        SlurmJob.watcher.clear()


@pytest.fixture(scope="module")
def stopped_twice(
    led_here: None, requeue_cluster: Part, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stories[Submitted]]:
    """Name of the executor -> its job, which was preempted, then stopped by submitit's
    ``_interrupt`` with two SIGTERMs behind it, and is now in its third attempt."""
    told = {
        "submitit": lambda folder: _stop_twice(_with_submitit(folder, requeue_cluster.nodes[0])),
        "hydroslurm": lambda folder: _stop_twice(
            _with_hydroslurm(folder, requeue_cluster.nodes[1])
        ),
    }
    base = tmp_path_factory.mktemp("stopped_twice")
    with stories(told, base, clusters=(requeue_cluster,), at_a_time=2) as all_of_them:
        yield all_of_them


def _stop_twice(job: Submitted) -> Submitted:
    assert isinstance(job.job, SlurmJob)
    try:
        job.wait_for_attempt(1)
        subprocess.run(
            ["srun", "-p", "urgent", "-w", job.node, "--exclusive", "-t1", "true"],
            check=True,
            timeout=LIMIT_S,
        )
        job.wait_for_attempt(2)
        job.job._interrupt(timeout=True)
        # Slurm sends signals without an order between them, and none may reach the next attempt
        job.wait_for_signal(2)
        for term in [job.send("TERM") for _ in range(2)]:
            term.wait(60)
        job.wait_for_attempt(3)
    except BaseException:
        job.job.cancel()
        raise
    (job.folder / "hurry").touch()
    return job


def _with_submitit(folder: Path, node: str) -> Submitted:
    executor = submitit.AutoExecutor(folder / "logs", cluster="slurm")
    executor.update_parameters(slurm_partition="low", slurm_nodelist=node, timeout_min=5)
    job = executor.submit(hydroslurm.preemptible(submitted.train), folder)
    run = RunDir(folder / "logs" / f"{job.job_id}_run")
    return Submitted(job, run, folder, node)


def _with_hydroslurm(folder: Path, node: str) -> Submitted:
    executor = Executor(folder / "%j", 3)
    executor.update_parameters(partition="low", nodelist=node, timeout_min=5)
    job = executor.submit(submitted.train, folder)
    assert isinstance(job, PausableJob)
    assert (folder / job.job_id).resolve() == job.run_dir.logs
    assert PausableJob(folder / "%j", job.job_id).run_dir == job.run_dir
    return Submitted(job, job.run_dir, folder, node)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the function returns when it is left alone."""
    done = subprocess.run(
        [sys.executable, submitted.__file__, str(tmp_path_factory.mktemp("alone"))],
        check=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.slurm
@pytest.mark.parametrize("executor", ["submitit", "hydroslurm"])
def test_a_submitted_function_outlives_its_preemptions(
    executor: str, stopped_twice: Stories[Submitted], alone: dict[str, Any]
) -> None:
    """An urgent job, then the warning signal followed by two SIGTERMs, each cost one attempt
    and no step; ``job.result()`` is what the function returns when it is left alone."""
    job = stopped_twice.result(executor, 3 * LIMIT_S)
    assert job.job.result() == alone
    attempts = AttemptLog(job.run.attempts_jsonl).attempts()
    # the warning is submitit's imitation, five minutes before the limit: for Slurm a user's signal
    assert [attempt.ending for attempt in attempts] == ["preempted", "asked", "finished"]
    assert [new.step for new in attempts[1:]] == [old.end_step for old in attempts[:-1]]
    seen = Counter((event.restart_count, event.kind) for event in job.events())
    for restart in (0, 1):  # submitit's own handlers would save, and requeue, once more per signal
        for kind in (EventKind.SAFE_POINT, EventKind.SAVE_COMMITTED, EventKind.REQUEUED):
            assert seen[restart, kind] == 1, (restart, kind)
    assert "Caught signal" not in (job.job.stderr() or "") + (job.job.stdout() or "")


def test_only_functions_can_be_made_preemptible() -> None:
    """A value that cannot be called is refused, with what to give instead."""
    with pytest.raises(UsageError, match=r"executor\.submit"):
        hydroslurm.preemptible(3)  # type: ignore[arg-type]
