"""The job of one peer on the dev cluster: submitted as its documentation says, and looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers import HERE, Peer

from hydroslurm.core.rundir import RUN_DIR_ENV
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.runtime.autoload import PREEMPT_ENV

BEGIN_DELAY_S = 6
"""What Slurm makes a requeued job wait here (AuthInfo=cred_expire=5). A job that ended instead and
is submitted again by hand waits as long: none is to gain by dying."""
COMMAND_LIMIT_S = 60.0
_REQUEUE = HERE.parent.parent / "sbatch/requeue.sbatch"
LOOK_EVERY_S = 1.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

_SCRIPT = """\
#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=60
#SBATCH --ntasks=1
{signal}
srun --ntasks=1 "$PYTHON" -u {script} "$@"
"""


def cluster_spec(nodes: int) -> ClusterSpec:
    """Preemption by requeue without grace, Slurm's default, and the user signal with it, which the
    documentation of submitit wants and which lets Lightning save too."""
    everywhere = f"Nodes=n[1-{nodes}] MaxTime=INFINITE DefaultTime=01:00:00 State=UP"
    return ClusterSpec(
        nodes=nodes,
        profile="requeue",
        kill_wait_s=10,
        partitions=f"""\
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low {everywhere} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent {everywhere} PriorityTier=10 PreemptMode=OFF
""",
    )


@dataclass(frozen=True)
class Place:
    """Where a peer trains: a node of the cluster, and the one core it stays on.

    Attributes:
        width: of the network.
    """

    cluster: DevCluster
    node: str
    core: int
    width: int


class Job:
    """A peer's training, over requeues and over submissions by hand.

    Args:
        folder: of this training alone; made here.
    """

    def __init__(self, peer: Peer, place: Place, folder: Path, *, epochs: int) -> None:
        self.peer, self.place, self.folder, self.epochs = peer, place, folder, epochs
        folder.mkdir(parents=True)
        self._settings = {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
            "COMPARE_CORE": str(place.core),
            "COMPARE_WIDTH": str(place.width),
        }
        self.job_id = self._submit()
        self.by_hand: list[str] = []
        self._next_look = 0.0
        self._over = False

    @property
    def is_done(self) -> bool:
        return (self.folder / "done.json").exists()

    def done(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "done.json").read_text()))

    def state(self) -> str:
        """What Slurm says of it; empty when it does not answer, or has forgotten the job."""
        return self._asked("%T")

    def help_up(self) -> None:
        """Do what its owner would have to: release it, or submit it again, and count that.

        It is looked at once in a while only, however often this is called. A job that is being
        requeued may look ended for a moment: that counts at the second look.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY_S
        state = self.state()
        was_over, self._over = self._over, state in OVER
        reason = self._asked("%r") if state == "PENDING" else ""
        if "held" in reason.lower():
            self._slurm("scontrol", "release", self.job_id)
            self.by_hand.append(f"released: {reason}")
        elif was_over and self._over and not self.is_done:
            self.job_id = self._submit(f"--begin=now+{BEGIN_DELAY_S}")
            self.by_hand.append(f"submitted again: {state}")

    def _asked(self, what: str) -> str:
        asked = ("--noheader", "--states=all", f"--format={what}", f"--jobs={self.job_id}")
        return self._slurm("squeue", *asked).strip()

    def command(self, *argv: str) -> subprocess.Popen[str]:
        """Start one of Slurm's programs."""
        return subprocess.Popen(
            argv,
            env=self.place.cluster.child_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def cancel(self) -> None:
        self._slurm("scancel", "--signal=KILL", "--full", self.job_id)
        self._slurm("scancel", self.job_id)

    def logs(self) -> str:
        """The last lines that it wrote."""
        texts = [path.read_text(errors="replace") for path in self.folder.rglob("*.out")]
        texts += [path.read_text(errors="replace") for path in self.folder.rglob("*_log.err")]
        return "\n".join("\n".join(text.splitlines()[-15:]) for text in texts)

    def _submit(self, *more: str) -> str:
        if not self.peer.script:
            return self._submit_callable(more)
        if self.peer.name == "hydroslurm":
            text = _REQUEUE.read_text()
            text = text.replace("examples/train_run.py", str(HERE / self.peer.script))
            more = ("--time=60", "--signal=URG@90", *more)
        else:
            signal = f"#SBATCH --signal={self.peer.signal}" if self.peer.signal else ""
            text = _SCRIPT.format(signal=signal, script=HERE / self.peer.script)
        script = self.folder / "job.sbatch"
        script.write_text(text)
        said = self._slurm(
            "sbatch",
            "--parsable",
            "--partition=low",
            f"--nodelist={self.place.node}",
            "--output=%j.out",
            *more,
            str(script),
            str(self.folder),
            str(self.epochs),
            more={
                "PYTHON": sys.executable,
                RUN_DIR_ENV: str(self.folder / "run"),
                PREEMPT_ENV: "requeue" if self.peer.preempt else "off",
            },
        )
        return said.split(";")[0].strip()

    def _submit_callable(self, more: Sequence[str]) -> str:
        """By submitit, in a process of its own: it reads its settings from the environment."""
        submission = [str(HERE / "submit_callable.py"), str(self.folder), str(self.epochs)]
        return self._slurm(sys.executable, *submission, self.place.node, *more).strip()

    def _slurm(self, *argv: str, more: dict[str, str] | None = None) -> str:
        environ = {**self.place.cluster.child_environ(), **self._settings, **(more or {})}
        done = subprocess.run(
            argv,
            env=environ,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        if done.returncode != 0 and argv[0] in ("sbatch", sys.executable):
            raise RuntimeError(f"`{' '.join(argv)}` ended with {done.returncode}: {done.stderr}")
        return done.stdout
