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
from digits import Config
from digits_job import StockTraining, run_training
from harness import finish, parser, scratch
from progress import read_progress, steps_lost
from submitit.slurm.slurm import SlurmJob

import hydroslurm
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.spec import Profile

HERE = Path(__file__).resolve().parent
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

    @property
    def attempts(self) -> int:
        """How many attempts have made a step."""
        spans = read_progress(self.config.folder / "progress")
        return sum(span.end > span.begin for span in spans)

    @property
    def is_over(self) -> bool:
        return bool(self.job.paths.result_pickle.exists())

    def lost(self) -> list[int]:
        """Per preemption, the steps that were trained again."""
        return steps_lost(read_progress(self.config.folder / "progress"))

    def preempt(self, way: str) -> subprocess.Popen[str]:
        """Begin it; the command ends when the urgent job has, or at once."""
        number = self.job.job_id
        signal = "URG" if self.name == "executor" else "USR2"
        urgent = ["srun", "-p", "urgent", "-w", self.node, "--exclusive", "--time=1", "true"]
        command = {
            "requeue": ["scontrol", "requeue", number],
            "signal": ["scancel", f"--signal={signal}", number],
        }.get(way, urgent)
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )

    def result(self) -> dict[str, Any] | None:
        """What the job returned; None when it failed."""
        try:
            return self.job.result()
        except submitit.core.utils.UncompletedJobError:
            return None


def submit(name: str, node: str, folder: Path, epochs: int) -> Arm:
    """Start one of the jobs on the cluster that this process is led to."""
    config = Config(folder, epochs)
    folder.mkdir(parents=True)
    parameters: dict[str, Any] = {"slurm_partition": "low", "timeout_min": 60}
    executor: Any
    if name == "executor":
        executor = hydroslurm.Executor(folder / "submitit")
        work: tuple[Any, ...] = (run_training, config)
    else:
        executor = submitit.AutoExecutor(folder / "submitit", cluster="slurm")
        work = (StockTraining(config),)
    executor.update_parameters(**parameters, slurm_nodelist=node)
    return Arm(name, node, config, executor.submit(*work))


def compare(profile: Profile, folder: Path, epochs: int) -> list[Arm]:
    """All jobs, through all ways that a profile has, to their ends."""
    with DevCluster.up(ClusterSpec(nodes=len(ARMS), profile=profile, kill_wait_s=5)) as cluster:
        lead_here(cluster)
        nodes = cluster.spec.node_names
        arms = [
            submit(name, node, folder / profile / name, epochs)
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
        command.communicate(timeout=LIMIT_S)


def lead_here(cluster: DevCluster) -> None:
    """Have submitit, in this process, submit to this cluster.

    Its watcher belongs to a class and asks one sacct for all jobs that it has ever seen: without
    forgetting, a job number of the cluster before would be taken for one of this.
    """
    os.environ.update(cluster.environ())
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    os.environ["OMP_NUM_THREADS"] = "1"
    SlurmJob.watcher.clear()


def wait(condition: Callable[[], bool], what: str, arms: Sequence[Arm]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            logs = "\n".join(f"{arm.name}:\n{arm.job.stderr()}" for arm in arms)
            raise TimeoutError(f"not within {LIMIT_S:g} s: {what}\n{logs}")
        time.sleep(0.1)


def main() -> None:
    chosen = parser("Stock submitit and hydroslurm, side by side.", directory=True).parse_args()
    epochs = 12 if chosen.quick else 40
    profiles: list[Profile] = ["gang-requeue"] if chosen.quick else list(STOPS)
    result: dict[str, Any] = {f"steps_lost_{name}": 0 for name in ARMS}
    with scratch("stock", chosen) as folder:
        for profile in profiles:
            for arm in compare(profile, folder, epochs):
                result[f"steps_lost_{arm.name}"] += sum(arm.lost())
                result[f"finished_{arm.name}"] = arm.result() is not None
    result["preemptions"] = sum(len(STOPS[profile]) for profile in profiles)
    finish(chosen, "stock submitit and hydroslurm: steps trained twice", result)


if __name__ == "__main__":
    main()
