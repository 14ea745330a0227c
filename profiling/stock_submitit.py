"""The same training with stock submitit and with hydroslurm, preempted in the same ways, side by
side: what is trained twice?

Two jobs, each on a node of its own of one dev cluster, are preempted at the same moments:

    stock        submitit's AutoExecutor and a callable with `checkpoint()`, as its docs say, that
                 also saves after every epoch, as a careful user would
    executor     a function with hydroslurm.Run, submitted with hydroslurm.Executor

Ways: `grace` (an urgent job, PreemptMode=REQUEUE with GraceTime), `gang` (an urgent job under gang
scheduling), `requeue` (scontrol requeue), `signal` (submitit's signal, as before a time limit: the
one for which stock submitit saves). Limits are one hour, so that its rule for 10 minutes or less
does not count. Not measured: sites with PreemptParameters=send_user_signal, where a preemption
sends submitit its signal too, provided that jobs ask for it (`--signal`, as submitit's do): there
`grace` would be like `signal`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from attempts import AttemptLog, read_attempts, steps_lost
from digits import ByHand, Config, train_in_a_run
from harness import PROFILING, Slurm, finish, finished, options, scratch
from processes import wait_until
from submitit.slurm.slurm import SlurmJob

import hydroslurm
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.spec import Profile

LIMIT_S = 240.0
STOPS: dict[Profile, tuple[str, ...]] = {
    "requeue": ("grace", "requeue", "signal"),
    "gang-requeue": ("gang",),
}
ARMS = ("stock", "executor")


@dataclass
class Arm:
    """One of the jobs."""

    name: str
    node: str
    config: Config
    job: submitit.Job[dict[str, Any]]
    slurm: Slurm

    @property
    def attempts(self) -> int:
        """How many attempts have made a step."""
        return sum(one.step > one.begin for one in read_attempts(self.config.folder / "attempts"))

    @property
    def is_over(self) -> bool:
        return bool(self.job.paths.result_pickle.exists())

    def lost(self) -> list[int]:
        """Per preemption, the steps that were trained again."""
        return steps_lost(read_attempts(self.config.folder / "attempts"))

    def preempt(self, way: str) -> subprocess.Popen[str]:
        """Begin it; the command ends when the urgent job has, or at once."""
        if way == "requeue":
            return self.slurm.start("scontrol", "requeue", self.job.job_id)
        if way == "signal":
            signal = "URG" if self.name == "executor" else "USR2"
            return self.slurm.start("scancel", f"--signal={signal}", self.job.job_id)
        return self.slurm.send_urgent_job(self.node)

    def result(self) -> dict[str, Any] | None:
        """What the job returned; None when it failed."""
        try:
            return self.job.result()
        except submitit.core.utils.UncompletedJobError:
            return None


def submit(name: str, node: str, folder: Path, *, epochs: int, cluster: DevCluster) -> Arm:
    """Start one of the jobs on the cluster that this process is led to."""
    config = Config(folder, epochs)
    folder.mkdir(parents=True)
    executor: Any
    if name == "executor":
        executor = hydroslurm.Executor(folder / "submitit")
        work: tuple[Any, ...] = (train_in_a_run, config, AttemptLog)
    else:
        executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
        work = (ByHand(config, AttemptLog),)
    executor.update_parameters(slurm_partition="low", timeout_min=60, slurm_nodelist=node)
    return Arm(name, node, config, executor.submit(*work), Slurm(cluster, folder))


def compare(profile: Profile, folder: Path, epochs: int) -> list[Arm]:
    """All jobs, through all ways that a profile has, to their ends."""
    with DevCluster.up(ClusterSpec(nodes=len(ARMS), profile=profile, kill_wait_s=5)) as cluster:
        lead_here(cluster)
        nodes = cluster.spec.node_names
        arms = [
            submit(name, node, folder / profile / name, epochs=epochs, cluster=cluster)
            for name, node in zip(ARMS, nodes, strict=True)
        ]
        wait(lambda: all(arm.attempts == 1 for arm in arms), "every job makes steps", arms)
        for attempt, way in enumerate(STOPS[profile], start=2):
            time.sleep(5.0)  # longer than an epoch, so that there is a save of one
            preempt_all(arms, way, attempt)
        for arm in arms:
            (arm.config.folder / "hurry").touch()
        wait(lambda: all(arm.is_over for arm in arms), "every job ends", arms)
        for arm in arms:
            arm.result()  # while there is a cluster to ask
        return arms


def preempt_all(arms: Sequence[Arm], way: str, attempt: int) -> None:
    """Preempt all jobs at once; wait until each makes steps again, in this attempt, or is over."""
    commands = [arm.preempt(way) for arm in arms]
    wait(
        lambda: all(arm.attempts == attempt or arm.is_over for arm in arms),
        f"every job makes steps after {way}",
        arms,
    )
    for command in commands:
        finished(command)


def lead_here(cluster: DevCluster) -> None:
    """Have submitit, in this process, submit to this cluster.

    Its watcher belongs to a class and asks one sacct for all jobs that it has ever seen: without
    forgetting, a job number of the cluster before would be taken for one of this.
    """
    os.environ.update(cluster.environ())
    paths = [str(PROFILING), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    os.environ["OMP_NUM_THREADS"] = "1"
    SlurmJob.watcher.clear()


def wait(condition: Callable[[], bool], what: str, arms: Sequence[Arm]) -> None:
    def said() -> str:
        return "\n".join([what, *(f"{arm.name}:\n{arm.job.stderr()}" for arm in arms)])

    wait_until(condition, said, limit_s=LIMIT_S)


def main() -> None:
    chosen = options("Stock submitit and hydroslurm, side by side.")
    epochs = 12 if chosen.quick else 40
    profiles: list[Profile] = ["gang-requeue"] if chosen.quick else list(STOPS)
    result: dict[str, Any] = {f"steps_lost_{name}": 0 for name in ARMS}
    with scratch("stock") as folder:
        for profile in profiles:
            for arm in compare(profile, folder, epochs):
                result[f"steps_lost_{arm.name}"] += sum(arm.lost())
                result[f"finished_{arm.name}"] = arm.result() is not None
    result["preemptions"] = sum(len(STOPS[profile]) for profile in profiles)
    finish(chosen, "stock submitit and hydroslurm: steps trained twice", result)


if __name__ == "__main__":
    main()
