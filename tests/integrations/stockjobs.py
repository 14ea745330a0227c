"""Scripts of people who know nothing of hydroslurm, as jobs on a real Slurm."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from processes import captured, text_of, wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import DevCluster

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
BATCH = """#!/bin/bash
export MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1
srun {srun} {script} {arguments}
"""
ALONE = f"--preempt=requeue {sys.executable}"
"""One task for each rank."""
TORCHRUN = (
    '--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 '
    f"{sys.executable} -m torch.distributed.run "
    '--nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=1 --rdzv-backend=c10d '
    '--rdzv-endpoint="127.0.0.1:$((29400 + SLURM_JOB_ID % 500))" --rdzv-id="$SLURM_JOB_ID"'
)
"""As docs/own-loop.md has it, but for the host: all nodes are this one."""
_STEP = re.compile(r"^(step \d+$|iter \d+: )", flags=re.M)


class StockJob:
    """One job: ``sbatch`` with ``srun --preempt=requeue python SCRIPT``, in a folder of its own.

    Args:
        srun: what comes between ``srun`` and the script.

    Attributes:
        folder: where it runs. job_id: Slurm's.
    """

    def __init__(
        self, cluster: DevCluster, folder: Path, script: str, *arguments: str, srun: str = ALONE
    ) -> None:
        self._cluster = cluster
        self.folder = folder
        folder.mkdir(parents=True)
        batch = folder / "job.sh"
        batch.write_text(
            BATCH.format(srun=srun, script=SCRIPTS / script, arguments=" ".join(arguments))
        )
        self.job_id = ""

    def submit(self, *options: str) -> StockJob:
        self.job_id = self.slurm(
            "sbatch", "--parsable", "--requeue", "--open-mode=append", "--output=out.txt",
            "--partition=low", *options, "job.sh",
        )  # fmt: skip
        return self

    def slurm(self, *argv: str) -> str:
        environ = self._cluster.child_environ(dict(os.environ))
        done = captured(argv, cwd=self.folder, env=environ, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self) -> str:
        return text_of(self.folder / "out.txt")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: f"{self.output()[-2000:]}", limit_s=300)

    def pid_of(self, rank: int, *, attempt: int) -> int:
        """The process of one rank in this attempt."""
        path = RunDir(self.folder / "hydroslurm-runs" / self.job_id).rank_status(rank)

        def pids() -> list[int]:
            told = read_status(path)
            return [told.pid] if told is not None and told.restart_count == attempt - 1 else []

        wait_until(pids, f"rank {rank} of attempt {attempt}: {self.output()[-2000:]}", limit_s=120)
        return pids()[0]

    def wait_for_end(self) -> str:
        """Slurm's word for how it ended."""
        wait_until(
            lambda: self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
            lambda: f"the end of job {self.job_id}: {self.output()[-2000:]}",
            limit_s=400,
        )
        return self.state()

    def state(self) -> str:
        try:
            shown = self.slurm("scontrol", "show", "job", self.job_id)
        except AssertionError:  # slurmctld forgets it 300 s behind its end; accounting does not
            asked = ("--noheader", "--parsable2", "--allocations", "--format=State")
            return self.slurm("sacct", *asked, f"--jobs={self.job_id}").partition(" ")[0]
        return next(word[9:] for word in shown.split() if word.startswith("JobState="))


def steps_of_attempt(said: str, attempt: int) -> int:
    """How many were trained since it began."""
    begun = "a new run, step 0" if attempt == 1 else f"attempt {attempt} resumes from step"
    return len(_STEP.findall(said.partition(begun)[2]))
