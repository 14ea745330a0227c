"""A function that trains with Lightning, as a job of submitit's own executor, whose handlers for
signals are there before ours or come after them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import submitit
import torch
from clusters import Part
from integrations.stockjobs import SCRIPTS, steps_of_attempt
from processes import wait_until
from submitit.slurm.slurm import SlurmJob

sys.path.insert(0, str(Path(__file__).parent))

import submitted_fit  # its ranks import it by this name too

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SCRIPT = SCRIPTS / "lightning_digits.py"
ARGUMENTS = ["--epochs=2", "--workers=2"]
OPTION = {"slurm_srun_args": ["--preempt=requeue"]}
EXPORTED = {"slurm_setup": ["export HYDROSLURM_PREEMPT=requeue"]}
TORCH = torch.Size([1])
"""The process imports torch, and Lightning's callback comes, before submitit's handlers do."""


@pytest.mark.parametrize(
    ("unpickled", "asked"),
    [
        pytest.param(None, OPTION, id="submitit's handlers first"),
        pytest.param(TORCH, EXPORTED, id="ours first"),
    ],
)
def test_it_is_requeued_and_goes_on(
    unpickled: object, asked: dict[str, Any], requeue_cluster: Part, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By an operator, by an urgent job, and by submitit's signal, at which submitit alone would end
    the job; weights and metrics are those of a process that was left alone."""
    alone, folder = tmp_path / "alone", tmp_path / "job"
    for one in (alone, folder):
        one.mkdir()
    subprocess.run([sys.executable, SCRIPT, *ARGUMENTS], cwd=alone, check=True, timeout=300)
    for name, value in requeue_cluster.environ().items():
        monkeypatch.setenv(name, value)
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.chdir(folder)
    # it belongs to its class, and would ask this cluster's sacct for the jobs of another
    SlurmJob.watcher.clear()
    executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
    executor.update_parameters(
        slurm_partition="low", slurm_nodelist=requeue_cluster.nodes[0],
        slurm_stderr_to_stdout=True, timeout_min=5, **asked,
    )  # fmt: skip
    urgent = ["srun", "-p", "urgent", "-w", requeue_cluster.nodes[0], "--exclusive", "-t1", "true"]
    slow = [*ARGUMENTS, "--pause-s=0.05"]
    job = executor.submit(submitted_fit.fit, SCRIPT, folder, slow, unpickled)
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
