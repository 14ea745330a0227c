"""Scripts of people who know nothing of hydroslurm, as jobs on a real Slurm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from processes import wait_until

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

    def pid_of(self, rank: int, *, variable: str = "SLURM_PROCID") -> int:
        """The process of one rank, by what Slurm has set, or torchrun (``RANK``): the oldest one,
        because its loader's workers have the same variables. Another cluster on this machine has a
        job of the same number, but not in this folder."""
        wanted = (f"SLURM_JOB_ID={self.job_id}", f"{variable}={rank}", "SLURM_STEP_ID=0")
        found: list[int] = []

        def look() -> bool:
            found[:] = [pid for pid in _pids() if _is_rank(pid, wanted, self.folder)]
            return bool(found)

        wait_until(look, f"rank {rank} of job {self.job_id}", limit_s=120)
        return min(found, key=_begun_ticks)

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


def _pids() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdecimal()]


def _begun_ticks(pid: int) -> int:
    """When it began. Numbers of processes begin anew at 32,768 on some machines."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _is_rank(pid: int, wanted: tuple[str, ...], folder: Path) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        is_here = Path(f"/proc/{pid}/cwd").samefile(folder)
    except OSError:
        return False
    return is_here and set(wanted) <= set(environ) and command[0] == os.fsencode(sys.executable)
