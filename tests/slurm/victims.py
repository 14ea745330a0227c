"""A real job step that ignores every request to end, and writes down what it gets and when."""

from __future__ import annotations

import sys
from pathlib import Path

from processes import wait_until

from hydroslurm.devcluster import DevCluster

# By os.write, because a handler that prints may tear the line that is being printed.
TASK = """\
import os, signal, subprocess, sys, time
out = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def say(word):
    os.write(out, f"{word} {time.time():.4f}\\n".encode())
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
def heard(number, frame):
    say(signal.Signals(number).name)
    if number == signal.SIGTERM and len(sys.argv) > 2 and first:
        ask = f"c = open_client(); c.requeue(c.job({os.environ['SLURM_JOB_ID']}))"
        code = f"from hydroslurm.slurm.client import open_client; {ask}"
        done = subprocess.run([sys.argv[2], "-c", code], cwd=sys.argv[3])
        say(f"requeue-ended-{done.returncode}")
for name in ("SIGCONT", "SIGTERM", "SIGURG"):
    signal.signal(getattr(signal, name), heard)
say("ready")
while True:
    time.sleep(0.02)
    say("alive")
"""
PACKAGE = Path(__file__).resolve().parents[2]


class Victim:
    """A job on one node whose only task is TASK.

    ``requeues_itself``: at its first SIGTERM the task asks for a requeue, from inside the job step.
    """

    def __init__(
        self,
        cluster: DevCluster,
        folder: Path,
        *options: str,
        node: str,
        cpus: int,
        requeues_itself: bool = False,
    ) -> None:
        self.cluster = cluster
        folder.mkdir(parents=True)
        self._out = folder / "out"
        task = folder / "task.py"
        task.write_text(TASK)
        more = f"{sys.executable} {PACKAGE}" if requeues_itself else ""
        script = folder / "job.sh"
        # not exec: a batch shell of its own, as most people have it
        script.write_text(f"#!/bin/bash\nsrun python3 {task} {self._out} {more}\n")
        where = ["-w", node, "-n1", f"-c{cpus}", "-D", str(folder), "-o", "log"]
        argv = ["sbatch", "--parsable", *where, *options, str(script)]
        self.id = int(cluster.run(argv).stdout.split(";")[0])

    def heard(self, word: str) -> list[float]:
        """The moments (epoch, s) of each line of that word."""
        lines = self._out.read_text().splitlines() if self._out.exists() else []
        rows = [line.split() for line in lines]
        return [float(row[1]) for row in rows if len(row) == 2 and row[0] == word]

    def wait_for(self, word: str, *, limit_s: float = 60.0) -> float:
        """The moment of the first line of that word, once it is there."""
        what = f"{word} from job {self.id}"
        wait_until(lambda: self.heard(word), what, limit_s=limit_s)
        return self.heard(word)[0]

    def wait_for_kill(self, *, limit_s: float = 60.0) -> float:
        """The last moment at which the task of the first attempt lived, once it is gone."""
        gone = ["squeue", "-h", "-j", str(self.id), "-t", "R,CG", "-o", "%i"]
        wait_until(
            lambda: not self.cluster.run(gone, check=False).stdout.strip(),
            f"job {self.id} to be ended",
            limit_s=limit_s,
        )
        second_attempt = [*self.heard("ready"), float("inf"), float("inf")][1]
        return max(moment for moment in self.heard("alive") if moment < second_attempt)

    def end(self) -> None:
        self.cluster.run(["scancel", "--full", "--signal=KILL", str(self.id)], check=False)
        self.cluster.run(["scancel", str(self.id)], check=False)


def preempt(cluster: DevCluster, *, node: str) -> None:
    """Submit a short urgent job that wants all of a node."""
    where = ["-p", "urgent", "-w", node, "-n1", f"-c{cluster.spec.cpus_per_node}"]
    cluster.run(["sbatch", *where, "-o", "/dev/null", "--wrap", "true"])
