"""Jobs on the two profiles: what the configuration promises, seen from inside the tasks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from clusters import Part
from processes import wait_until

from hydroslurm.devcluster import DevCluster, config
from hydroslurm.errors import ClusterError

pytestmark = pytest.mark.slurm

# Writes the name and the time of every signal it gets; in the grace it goes on working. Not to
# stdout: srun, which carries that, is suspended too. By os.write, because a handler that prints may
# tear the line that is being printed.
TASK = """\
import os, signal, sys, time
out = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def say(word, number):
    os.write(out, f"{word} {number}\\n".encode())
for name in ("SIGTSTP", "SIGCONT", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda s, f: say(signal.Signals(s).name, time.time()))
say("ready", os.environ.get("SLURM_RESTART_COUNT", 0))
end = time.monotonic() + 60
while time.monotonic() < end and not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
    say("alive", time.time())
"""


class Job:
    """A task on every CPU of one node of partition ``low``, and what it wrote."""

    def __init__(self, cluster: DevCluster, folder: Path, *, node: str) -> None:
        self.cluster = cluster
        self.out = folder / "out.txt"
        self.enough = folder / "enough"
        task = folder / "task.py"
        task.write_text(TASK)
        script = folder / "job.sh"
        script.write_text(
            "#!/bin/sh\n#SBATCH --requeue --open-mode=append\n"
            f'exec srun --unbuffered python3 "{task}" "{self.enough}" "{self.out}"\n'
        )
        cpus = cluster.spec.cpus_per_node
        submitted = cluster.run(
            [
                *f"sbatch --parsable -p low -w {node} -n1 -c{cpus} -o /dev/null".split(),
                f"--chdir={folder}",
                str(script),
            ]
        )
        self.id = submitted.stdout.strip()

    def said(self, word: str) -> list[float]:
        """The numbers behind each line that begins with a word."""
        lines = self.out.read_text().splitlines() if self.out.exists() else []
        rows = [line.split() for line in lines]
        return [float(row[1]) for row in rows if len(row) == 2 and row[0] == word]

    def wait_for(self, word: str, *, times: int = 1) -> float:
        """The number behind the latest of so many lines that begin with a word."""
        wait_until(lambda: len(self.said(word)) >= times, f"{times} x {word} from job {self.id}")
        return self.said(word)[-1]

    def state(self) -> str:
        return self.cluster.run(["squeue", "-h", "-j", self.id, "-o", "%T"]).stdout.strip()

    def finish(self) -> None:
        """Let it end by itself, and wait until accounting has it."""
        self.enough.touch()
        wait_until(lambda: self.account() == "COMPLETED", f"job {self.id} in sacct")

    def account(self) -> str:
        listed = self.cluster.run(["sacct", "-X", "-n", "-P", "-j", self.id, "-o", "State"])
        return listed.stdout.strip().partition("\n")[0]


def test_jobs_run_on_several_nodes_and_are_accounted(pause_cluster: Part) -> None:
    """An srun over all nodes reaches each of them, and sacct knows its end, account and cluster."""
    nodes = len(pause_cluster.nodes)
    done = pause_cluster.run(["srun", f"-N{nodes}", f"-n{nodes}", "printenv", "SLURMD_NODENAME"])
    assert sorted(done.stdout.split()) == list(pause_cluster.nodes)
    columns = ["sacct", "-X", "-n", "-P", "-o", "State,NNodes,Cluster"]
    wait_until(
        lambda: f"COMPLETED|{nodes}|hydroslurm-dev" in pause_cluster.run(columns).stdout,
        "the job in sacct",
    )


def test_it_listens_on_the_loopback_interface_only(pause_cluster: Part) -> None:
    """All ports of the cluster listen, none of them beyond the loopback interface."""
    text = pause_cluster.slurm_conf.read_text()
    words = text.replace("\n", " ").split(" ")
    numbers = [int(w.partition("=")[2]) for w in words if w.partition("=")[0].endswith("Port")]
    assert len(numbers) == 2 + pause_cluster.spec.nodes
    assert all(config.listening(port) for port in numbers)
    assert config.open_to_others(numbers) == []


def test_status_shows_daemons_and_nodes(pause_cluster: Part) -> None:
    """Every daemon is alive and every node is up, also for somebody who attaches later."""
    for cluster in (pause_cluster, DevCluster.attach(pause_cluster.directory)):
        status = cluster.status()
        names = ["munged", "mariadbd", "slurmdbd", "slurmctld"]
        names += [f"slurmd-{node}" for node in pause_cluster.spec.node_names]
        assert [d.name for d in status.daemons] == names
        assert all(d.alive for d in status.daemons)
        assert [n.name for n in status.nodes] == list(pause_cluster.spec.node_names)


def test_a_program_that_fails_says_why(pause_cluster: Part) -> None:
    """Slurm's own words are in the error, a program that hangs is ended, a missing one is named."""
    with pytest.raises(ClusterError, match=r"`scontrol show job 987654` .*Invalid job id"):
        pause_cluster.run(["scontrol", "show", "job", "987654"])
    with pytest.raises(ClusterError, match=r"`sleep 60` took longer than 0\.2 s"):
        pause_cluster.run(["sleep", "60"], timeout_s=0.2)
    with pytest.raises(ClusterError, match="`no-such-program` could not be run"):
        pause_cluster.run(["no-such-program"])
    assert pause_cluster.run(["false"], check=False).returncode == 1


def test_suspend_stops_after_two_seconds_and_resume_continues(
    pause_cluster: Part, tmp_path: Path
) -> None:
    """`scontrol suspend` gives SIGTSTP, 2 s of work, and a stop; `resume` gives SIGCONT."""
    job = Job(pause_cluster, tmp_path, node=pause_cluster.nodes[0])
    job.wait_for("alive")
    pause_cluster.run(["scontrol", "suspend", job.id])
    told_at = job.wait_for("SIGTSTP")
    assert job.state() == "SUSPENDED"

    def stopped() -> bool:
        before = job.said("alive")
        time.sleep(0.5)  # twenty-five times the task's own period
        return job.said("alive") == before

    wait_until(stopped, "the task to be stopped")
    last_alive = job.said("alive")[-1]
    assert 1.5 < last_alive - told_at < 5
    pause_cluster.run(["scontrol", "resume", job.id])
    job.wait_for("SIGCONT")
    wait_until(lambda: job.said("alive")[-1] > last_alive, "the task to go on")
    job.finish()


def test_urgent_suspends_low_by_gang_scheduling(pause_cluster: Part, tmp_path: Path) -> None:
    """An urgent srun starts at once on the CPUs of a low job, which is suspended and continues in
    place; another low job waits meanwhile and is given no time slice."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    first = Job(pause_cluster, tmp_path / "first", node=pause_cluster.nodes[1])
    first.wait_for("alive")
    second = Job(pause_cluster, tmp_path / "second", node=pause_cluster.nodes[1])
    cpus = pause_cluster.spec.cpus_per_node
    urgent = ["srun", "-p", "urgent", "-w", pause_cluster.nodes[1], "-n1", f"-c{cpus}"]
    state_of_low = ["squeue", "-h", "-j", first.id, "-o", "%T"]
    seen = pause_cluster.run([*urgent, *state_of_low]).stdout.strip()
    assert seen == "SUSPENDED"
    first.wait_for("SIGTSTP")
    first.wait_for("SIGCONT")
    assert second.state() == "PENDING"
    assert first.said("SIGTERM") == []
    first.finish()
    second.wait_for("ready")
    second.finish()
