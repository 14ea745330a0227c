"""Scripts of people who know nothing of hydroslurm, requeued six times by a real Slurm within two
epochs: by an operator, by an urgent job, and by a SIGTERM to the last rank only."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from integrations.stockjobs import AGENT, ALONE, StockJob

from hydroslurm.devcluster import DevCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.frameworks]

LIGHTNING = {
    "ranks 1, workers 0": "--epochs=2 --workers=0 --pause-s=0.1",
    "ranks 1, workers 2, accumulated": "--epochs=2 --workers=2 --accumulate=4 --pause-s=0.1",
    "ranks 2, workers 0, accumulated":
        "--epochs=2 --workers=0 --accumulate=4 --pause-s=0.3 --devices=2",
    "ranks 2, workers 2": "--epochs=2 --workers=2 --pause-s=0.2 --devices=2",
}  # fmt: skip
OTHERS = {
    "ranks 1, workers 0": "--workers=0 --items=120 --pause-s=0.3",
    "ranks 1, workers 2, accumulated": "--workers=2 --accumulate=4 --items=360 --pause-s=0.3",
    "ranks 2, workers 0, accumulated": "--workers=0 --accumulate=4 --items=720 --pause-s=0.3",
    "ranks 2, workers 2": "--workers=2 --items=240 --pause-s=0.3",
}
CASES = [
    pytest.param(script, case, arguments, id=f"{script}: {case}")
    for script, cases in (
        ("lightning_digits.py", LIGHTNING),
        ("hf_causal_lm.py", OTHERS),
        ("trl_sft.py", OTHERS),
        ("accelerate_loop.py", OTHERS),
    )
    for case, arguments in cases.items()
]
BY = ("requeue", "signal", "urgent", "requeue", "signal", "requeue")


@pytest.mark.parametrize(("script", "case", "arguments"), CASES)
def test_six_requeues(
    script: str, case: str, arguments: str, requeue_cluster: DevCluster, tmp_path: Path
) -> None:
    """The losses and the weights are those of a run that was left alone, on the other node."""
    ranks = int(case.split(",")[0].removeprefix("ranks "))
    alone, job = (
        submitted(requeue_cluster, tmp_path / node, node, script, arguments, ranks=ranks)
        for node in ("n1", "n2")
    )
    for number, by in enumerate(BY, start=1):
        wait_for_step(job, attempt=number)
        stop(job, by, rank=ranks - 1, of_agent=is_of_agent(script, ranks))
    assert job.wait_for_end() == "COMPLETED", job.output()
    assert alone.wait_for_end() == "COMPLETED", alone.output()
    assert f"attempt {len(BY) + 1} resumes from step" in job.output()
    assert "attempt 2" not in alone.output()
    assert results(job) == results(alone)


def submitted(
    cluster: DevCluster, folder: Path, node: str, script: str, arguments: str, *, ranks: int
) -> StockJob:
    given = arguments.split() if script == "lightning_digits.py" else ["out", *arguments.split()]
    by_agent = is_of_agent(script, ranks)
    job = StockJob(cluster, folder, script, *given, srun=AGENT if by_agent else ALONE)
    tasks = 1 if by_agent else ranks
    return job.submit(f"--nodelist={node}", "--nodes=1", f"--ntasks-per-node={tasks}")


def is_of_agent(script: str, ranks: int) -> bool:
    """Hugging Face's ranks find each other by torchrun's variables."""
    return ranks > 1 and script != "lightning_digits.py"


def wait_for_step(job: StockJob, *, attempt: int) -> None:
    """One step at least was trained in this attempt."""
    begun = "a new run, step 0" if attempt == 1 else f"attempt {attempt} resumes from step"
    job.wait_for(lambda: "\nstep " in job.output().partition(begun)[2])


def stop(job: StockJob, by: str, *, rank: int, of_agent: bool) -> None:
    if by == "requeue":
        job.slurm("scontrol", "requeue", job.job_id)
    elif by == "signal":
        os.kill(job.pid_of(rank, variable="RANK" if of_agent else "SLURM_PROCID"), signal.SIGTERM)
    else:
        urgent = ("--partition=urgent", "--exclusive", "--time=1", "--nodelist=n2", "--ntasks=1")
        job.slurm("srun", *urgent, "true")


def results(job: StockJob) -> Mapping[str, bytes]:
    """What the script has written: losses and weights."""
    names = ("final.pt", "logs/**/metrics.csv", "out/result.txt", "out/losses-*")
    found = {path for name in names for path in job.folder.glob(name)}
    assert found
    return {str(path.relative_to(job.folder)): path.read_bytes() for path in sorted(found)}
