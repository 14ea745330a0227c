"""Scripts of people who know nothing of hydroslurm, as jobs on a real Slurm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from processes import wait_until

from hydroslurm.devcluster import DevCluster

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
BATCH = """#!/bin/bash
export MASTER_ADDR=127.0.0.1 OMP_NUM_THREADS=1
srun --preempt=requeue {python} {script} {arguments}
"""


class StockJob:
    """One job: ``sbatch`` with ``srun --preempt=requeue python SCRIPT``, in a folder of its own.

    Attributes:
        folder: where it runs. job_id: Slurm's.
    """

    def __init__(self, cluster: DevCluster, folder: Path, script: str, *arguments: str) -> None:
        self._cluster = cluster
        self.folder = folder
        folder.mkdir(parents=True)
        batch = folder / "job.sh"
        batch.write_text(
            BATCH.format(
                python=sys.executable, script=SCRIPTS / script, arguments=" ".join(arguments)
            )
        )
        self.job_id = ""

    def submit(self, *options: str) -> StockJob:
        self.job_id = self.slurm(
            "sbatch", "--parsable", "--requeue", "--open-mode=append", "--output=out.txt",
            "--partition=low", *options, "job.sh",
        )  # fmt: skip
        return self

    def slurm(self, *argv: str) -> str:
        done = subprocess.run(
            argv, cwd=self.folder, env=self._cluster.child_environ(dict(os.environ)),
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def output(self) -> str:
        path = self.folder / "out.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: f"{self.output()[-2000:]}", limit_s=300)

    def pid_of(self, rank: int) -> int:
        """The process of one rank, by the environment that Slurm gave it."""
        wanted = (f"SLURM_JOB_ID={self.job_id}", f"SLURM_PROCID={rank}", "SLURM_STEP_ID=0")
        found: list[int] = []

        def look() -> bool:
            found[:] = [pid for pid in _pids() if _is_rank(pid, wanted)]
            return bool(found)

        wait_until(look, f"rank {rank} of job {self.job_id}", limit_s=120)
        return min(found)

    def wait_for_end(self) -> str:
        """Slurm's word for how it ended."""
        wait_until(
            lambda: self.state() in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"),
            lambda: f"the end of job {self.job_id}: {self.output()[-2000:]}",
            limit_s=400,
        )
        return self.state()

    def state(self) -> str:
        shown = self.slurm("scontrol", "show", "job", self.job_id)
        return next(word[9:] for word in shown.split() if word.startswith("JobState="))


def _pids() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]


def _is_rank(pid: int, wanted: tuple[str, ...]) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return set(wanted) <= set(environ) and command[0] == os.fsencode(sys.executable)
