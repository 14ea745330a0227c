"""Jobs on a real Slurm for whoever shows jobs: trainings that save, and others."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from processes import captured, wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import DevCluster

TRAIN = Path(__file__).parents[1] / "training" / "endless.py"


@dataclass
class Watched:
    """Jobs of one task each, which are submitted from ``folder``."""

    cluster: DevCluster
    folder: Path
    ids: list[str] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        return self.cluster.child_environ()

    def submit(self, name: str, wrap: str, *options: str) -> str:
        log = ("-o", str(self.folder / "%j.out"))
        command = ["sbatch", "-n1", "--parsable", "--overcommit", "-J", name, *log, *options]
        command += ["--wrap", wrap]
        done = captured(command, env=self.environ, cwd=self.folder, timeout=60)
        assert done.returncode == 0, done.stderr
        self.ids.append(done.stdout.strip())
        return self.ids[-1]

    def train(self, name: str, *, save_every: int, think_s: float) -> str:
        settings = "export HYDROSLURM_HEARTBEAT_S=0.3 OMP_NUM_THREADS=1"
        wrap = f"{settings}; srun {sys.executable} {TRAIN} {save_every} {think_s}"
        return self.submit(name, wrap)

    def wait_for_save(self, job_id: str) -> None:
        """And for a rate of steps."""
        run = RunDir(self.folder / "hydroslurm-runs" / job_id)

        def has_saved() -> bool:
            status = read_status(run.rank_status(0))
            told = status is not None and status.steps_per_s is not None and (status.step or 0) > 20
            return told and any(run.checkpoints.glob("step-*"))

        wait_until(has_saved, f"a save of {job_id} in {self.folder}")

    def end(self) -> None:
        for job_id in self.ids:
            for command in (
                ["scontrol", "resume", job_id],
                ["scontrol", "update", f"JobId={job_id}", "Requeue=0"],
                ["scancel", "--full", "-s", "KILL", job_id],
                ["scancel", job_id],
            ):
                self.cluster.run(command, check=False)
