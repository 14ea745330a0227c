"""A function that trains with Lightning, as a job of submitit's own executor, whose handlers for
signals are there before ours or come after them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import submitit
import torch
from clusters import Part
from integrations.stockjobs import SCRIPTS, steps_of_attempt
from processes import wait_until
from submitit.slurm.slurm import SlurmJob

import hydroslurm
from hydroslurm.core.status import read_status

sys.path.insert(0, str(Path(__file__).parent))

import submitted_fit  # its ranks import it by this name too

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SCRIPT = SCRIPTS / "lightning_digits.py"
ARGUMENTS = ["--epochs=2", "--workers=2"]
OPTION = {"slurm_srun_args": ["--preempt=requeue"]}
EXPORTED = {"slurm_setup": ["export HYDROSLURM_PREEMPT=requeue"]}
RUNS = "hydroslurm-runs/*/events/rank-00000.json"
INNER = """
import time
from pathlib import Path
import torch
import hydroslurm

optimizer = torch.optim.SGD((model := torch.nn.Linear(2, 2)).parameters(), 0.1)
with hydroslurm.Run(model=model, optimizer=optimizer) as run:
    for step in run.steps(10**6):
        model(torch.randn(1, 2)).sum().backward()
        optimizer.step()
        time.sleep(0.02)
        if Path("enough").exists():
            break
"""
TORCH = torch.Size([1])
"""The process imports torch, and Lightning's callback comes, before submitit's handlers do."""


@pytest.mark.parametrize(
    ("function", "unpickled", "asked"),
    [
        pytest.param(submitted_fit.fit, None, OPTION, id="submitit's handlers first"),
        pytest.param(submitted_fit.fit, TORCH, EXPORTED, id="ours first"),
        pytest.param(hydroslurm.preemptible(submitted_fit.fit), TORCH, {}, id="wrapped"),
    ],
)
def test_it_is_requeued_and_goes_on(
    function: Callable[..., list[str]], unpickled: object, asked: dict[str, Any],
    requeue_cluster: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By an operator, by an urgent job, and by submitit's signal, at which submitit alone would end
    the job; weights and metrics are those of a process that was left alone."""
    alone, folder = tmp_path / "alone", tmp_path / "job"
    for one in (alone, folder):
        one.mkdir()
    subprocess.run([sys.executable, SCRIPT, *ARGUMENTS], cwd=alone, check=True, timeout=300)
    executor = executor_in(folder, requeue_cluster, monkeypatch)
    executor.update_parameters(**asked)
    urgent = ["srun", "-p", "urgent", "-w", requeue_cluster.nodes[0], "--exclusive", "-t1", "true"]
    slow = [*ARGUMENTS, "--pause-s=0.05"]
    job = executor.submit(function, SCRIPT, folder, slow, unpickled)
    said = lambda: job.stdout() or ""  # noqa: E731
    try:
        for attempt, stop in enumerate(
            (
                ["scontrol", "requeue", job.job_id],
                urgent,
                ["scancel", "--signal=USR2", job.job_id],
            ),
            start=1,
        ):
            begun = lambda n=attempt: steps_of_attempt(said(), n) >= 2  # noqa: E731
            wait_until(begun, said, limit_s=180)
            subprocess.run(stop, check=True, timeout=180)
        made = job.result()
    finally:
        job.cancel(check=False)
    assert made == sorted(str(one.relative_to(alone)) for one in (alone / "logs").rglob("*"))
    for name in ("final.pt", "logs/lightning_logs/version_0/metrics.csv"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
    assert "attempt 4 resumes from step" in said()
    assert "Caught signal" not in said()  # submitit's handler of the warning


def test_a_job_that_it_submits(
    requeue_cluster: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is another one, though it inherits all variables: it has a run folder of its own, USR1
    and USR2 pause it, and a stop requeues it."""
    script, said = tmp_path / "inner.py", tmp_path / "inner.txt"
    script.write_text(INNER)
    outer = hydroslurm.preemptible(submitted_fit.submit_inside)
    job = executor_in(tmp_path, requeue_cluster, monkeypatch).submit(
        outer, tmp_path, sys.executable, str(script)
    )
    try:
        wait_until(lambda: any(tmp_path.glob(RUNS)), lambda: job.stdout() or "", limit_s=120)
        (path,) = tmp_path.glob(RUNS)
        inner = path.parents[1].name
        assert inner != job.job_id
        for signal, state in (("USR1", "parked"), ("USR2", "running")):
            subprocess.run(["scancel", f"--signal={signal}", inner], check=True, timeout=60)
            wait_until(lambda state=state: read_status(path).state == state, path.read_text)
        subprocess.run(["scontrol", "requeue", inner], check=True, timeout=60)
        wait_until(lambda: "attempt 2 resumes from step" in said.read_text(), said.read_text)
        (tmp_path / "enough").touch()
        assert job.result() == 0, said.read_text()
    finally:
        job.cancel(check=False)


def executor_in(
    folder: Path, cluster: Part, monkeypatch: pytest.MonkeyPatch
) -> submitit.AutoExecutor:
    """That of a process which is led to the cluster. submitit's watcher belongs to its class: it
    would ask this cluster's sacct for the jobs of another."""
    for name, value in cluster.environ().items():
        monkeypatch.setenv(name, value)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.chdir(folder)
    SlurmJob.watcher.clear()
    executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
    executor.update_parameters(
        slurm_partition="low",
        slurm_nodelist=cluster.nodes[0],
        slurm_stderr_to_stdout=True,
        timeout_min=5,
    )
    return executor
