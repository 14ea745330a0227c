"""The job of one peer on the dev cluster: submitted as its documentation says, and looked at."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import SLURM_LIMIT_S, Slurm
from peers import HERE, Peer
from sbatchfiles import requeue_script

from hydroslurm.core.proc import PARENT, environ_of, pids, stat_of, status_of
from hydroslurm.core.rundir import RUN_DIR_ENV
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.runtime.autoload import PREEMPT_ENV

BEGIN_DELAY_S = 6
"""What Slurm makes a requeued job wait here (AuthInfo=cred_expire=5). A job that ended instead and
is submitted again by hand waits as long: none is to gain by dying."""
LOOK_EVERY_S = 1.0
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")

_SCRIPT = """\
#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --time=60
#SBATCH --ntasks=1
{signal}
srun --ntasks=1 python3 -u {script} "$@"
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
    """Where a peer trains: a node of the cluster, the one core it stays on, and the node of those
    that need a second one; and how: the width of the network, and for how long a step waits."""

    cluster: DevCluster
    node: str
    core: int
    width: int
    think_s: float
    spare: str = ""


class Job:
    """A peer's training, over requeues and over submissions by hand."""

    def __init__(self, peer: Peer, place: Place, folder: Path, *, epochs: int) -> None:
        self.peer, self.place, self.folder, self.epochs = peer, place, folder, epochs
        folder.mkdir(parents=True)
        environ = {
            "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
            "COMPARE_CORE": str(place.core),
            "COMPARE_FOLDER": str(folder),  # by which its processes are known
            RUN_DIR_ENV: str(folder / "run"),
            PREEMPT_ENV: "requeue" if peer.preempt else "off",
        }
        self.slurm = Slurm(place.cluster, folder, environ)
        if peer.name == "torchft":
            self._submit("spared", node=place.spare)
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
            self.slurm.run("scontrol", "release", self.job_id)
            self.by_hand.append(f"released: {reason}")
        elif was_over and self._over and not self.is_done:
            self.job_id = self._submit(begin=f"now+{BEGIN_DELAY_S}")
            self.by_hand.append(f"submitted again: {state}")

    def lose_node(self) -> None:
        """Have its node fail: all that runs there is killed at once, and Slurm requeues the job."""
        variables = {"SLURM_JOB_ID": self.job_id, "COMPARE_FOLDER": str(self.folder)}
        killed, parents = [], set()
        for pid in pids():
            with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                if variables.items() <= environ_of(pid).items():
                    parents.add(int(stat_of(pid)[PARENT]))
                    killed.append(pid)
        steps = [pid for pid in parents if status_of(pid).get("Name") == "slurmstepd"]
        if not steps:
            raise RuntimeError(f"job {self.job_id} has no processes on {self.place.node}")
        for pid in steps:  # so that they do not report what they see
            os.kill(pid, signal.SIGSTOP)
        for pid in (*killed, *steps):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node = ("scontrol", "update", f"NodeName={self.place.node}")
        self.slurm.run(*node, "State=DOWN", "Reason=failure")
        # refused where it is back already: its slurmd is alive
        self.slurm.start(*node, "State=RESUME").communicate(timeout=SLURM_LIMIT_S)

    def logs(self) -> str:
        """The last lines that it wrote."""
        texts = [path.read_text(errors="replace") for path in self.folder.rglob("*.out")]
        texts += [path.read_text(errors="replace") for path in self.folder.rglob("*_log.err")]
        return "\n".join("\n".join(text.splitlines()[-15:]) for text in texts)

    def _asked(self, what: str) -> str:
        asked = ("--noheader", "--states=all", f"--format={what}", f"--jobs={self.job_id}")
        out, _ = self.slurm.start("squeue", *asked).communicate(timeout=SLURM_LIMIT_S)
        return out.strip()

    def _submit(self, *words: str, begin: str = "now", node: str = "") -> str:
        place, node = self.place, node or self.place.node
        arguments = (self.folder, self.epochs, place.width, place.think_s)
        script, *first = self.peer.script.split()
        first, words = list(words) or first, [str(one) for one in arguments]
        if self.peer.name == "submitit":  # it reads its settings from the environment
            return self.slurm.run(sys.executable, str(HERE / script), *first, node, begin, *words)
        options = ["--partition=low", f"--nodelist={node}", "--output=%j.out", f"--begin={begin}"]
        if self.peer.name == "hydroslurm":
            text = requeue_script(f'python3 -u {HERE / script} "$@"')
            options += ["--time=60", f"--signal={self.peer.signal}"]
        else:
            asked = f"#SBATCH --signal={self.peer.signal}" if self.peer.signal else ""
            text = _SCRIPT.format(signal=asked, script=HERE / script)
        batch = self.folder / "job.sbatch"
        batch.write_text(text)
        return self.slurm.submit(*options, str(batch), *first, *words)
