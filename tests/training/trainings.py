"""A real training (examples/demo_train.py) on a real Slurm, and what is done to it."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import captured, wait_until

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.training.attempts import AttemptLog, AttemptRecord

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "tests" / "recorded"
SCRIPT = ROOT / "examples" / "demo_train.py"
LIMIT_S = 300.0
ALONE_LIMIT_S = 600.0
"""It runs beside those that are stopped."""


def options(out: Path, *, epochs: int) -> list[str]:
    # small batches: many steps, which is what is stopped, for little work
    batches = ["--batch-size", "16", "--every-steps", "150", "--log-every", "5"]
    return [*batches, "--epochs", str(epochs), "--out", str(out)]


@dataclass
class Training:
    """One batch job on one cluster."""

    cluster: DevCluster
    folder: Path
    epochs: int
    think_s: float = 0.01
    job_id: str = ""
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.folder / "out.json"

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "hydroslurm-runs" / self.job_id)

    def end(self) -> None:
        """Cancel it, until it is gone: one that is on its way into the queue does not hear of it,
        and would come back between later tests."""

        def is_gone() -> bool:
            self.slurm("scancel", self.job_id, check=False)
            return not self.slurm("squeue", "-h", "-j", self.job_id, check=False).strip()

        wait_until(is_gone, f"end of job {self.job_id}")

    def slurm(self, *command: str, check: bool = True) -> str:
        done = captured(
            command,
            cwd=self.folder,
            env={**self.cluster.child_environ(), "OMP_NUM_THREADS": "1", **self.environ},
            timeout=120,
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *sbatch_options: str) -> Training:
        """sbatch/requeue.sbatch as it is, with options; its training keeps a record."""
        (self.folder / "examples").mkdir(parents=True)
        (self.folder / "examples" / "train_run.py").symlink_to(SCRIPT)
        script = str(ROOT / "sbatch" / "requeue.sbatch")
        given = [*options(self.out, epochs=self.epochs), f"--think-s={self.think_s}"]
        self.job_id = self.slurm("sbatch", "--parsable", *sbatch_options, script, *given)
        return self

    def events(self) -> list[Event]:
        path = self.run.rank_events(0)
        return list(read_events(path)) if path.exists() else []

    def attempts(self) -> tuple[AttemptRecord, ...]:
        return AttemptLog(self.run.attempts_jsonl).attempts()

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    def wait_for_attempt(self, number: int) -> None:
        """Until so many attempts have begun and the newest has made a step, or was stopped before:
        a warning may come while it still imports."""

        def begun() -> bool:
            made = [
                e
                for e in self.events()
                if e.kind in (EventKind.FIRST_STEP, EventKind.ATTEMPT_BEGAN)
            ]
            first = any(e.data["attempt"] == number for e in made if e.kind is EventKind.FIRST_STEP)
            return first or any(e.data["attempt"] > number for e in made)

        wait_until(begun, f"attempt {number}\n{self.log()}", limit_s=LIMIT_S)

    def wait_for_step(self, step: int) -> None:
        """Until its log shows this step; it may be some steps further by then."""

        def reached() -> bool:
            shown = re.findall(r"^epoch \d+ step (\d+)", self.log(), flags=re.MULTILINE)
            return bool(shown) and int(shown[-1]) >= step

        wait_until(reached, f"step {step}\n{self.log()}", limit_s=LIMIT_S)

    def wait_for_end(self) -> dict[str, Any]:
        wait_until(self.out.exists, f"the end of the training\n{self.log()}", limit_s=LIMIT_S)
        wait_until(self.run.finished_json.exists, "the finished marker")
        return dict(json.loads(self.out.read_text()))


def steps_lost(attempts: tuple[AttemptRecord, ...]) -> int:
    """Steps that were trained and are not in the state that the next attempt begins with."""
    return sum(
        before.end_step - after.step
        for before, after in itertools.pairwise(attempts)
        if before.end_step is not None
    )
