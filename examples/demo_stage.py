"""What both acts of the demo stand on: the narrator, waiting, and a private Slurm."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from hydroslurm.core.rundir import RUN_DIR_ENV, RunDir
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.spec import Profile
from hydroslurm.errors import HydroslurmError
from hydroslurm.jobs.control.requests import JobAnswer
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.runtime.autoload import PREEMPT_ENV

EXAMPLES = Path(__file__).resolve().parent
console = Console(highlight=False)


def say(text: str) -> None:
    console.print(f"[bold]demo[/]  {text}", soft_wrap=True)


def tell(answer: JobAnswer) -> None:
    words = "; ".join(one.message for one in answer.answers) or "no answer in time"
    say(f"{answer.how} {answer.job_id}: {words}")


def wait_for(what: str, condition: Callable[[], bool], *, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise HydroslurmError(
                f"waited {limit_s:g} s for {what}; look at the logs in the run folder"
            )
        time.sleep(0.02)


def wait_for_state(run: RunDir, state: str, *, pauses: int = 0) -> None:
    def reached() -> bool:
        now = read_status(run.rank_status(0))
        return now is not None and now.state == state and now.pauses >= pauses

    wait_for(f"rank 0 of {run.root.name} to be {state}", reached)


def log_lines(run: RunDir) -> list[str]:
    """What the ranks have printed so far."""
    logs = [path for path in sorted(run.logs.iterdir()) if path.suffix in (".out", ".txt")]
    return [line for log in logs for line in log.read_text().splitlines()]


@contextlib.contextmanager
def private_slurm(profile: Profile, folder: Path, *, nodes: int) -> Iterator[None]:
    """Within it the Slurm programs and this process talk to a Slurm of their own."""
    say(f"starting a private Slurm of {nodes} nodes on this machine (for trying and testing only)")
    began = time.monotonic()
    with DevCluster.up(ClusterSpec(nodes=nodes, profile=profile, directory=folder)) as cluster:
        up_s = time.monotonic() - began
        say(f"up after {up_s:.1f} s: munge, MariaDB, slurmdbd, slurmctld, {nodes} slurmd")
        before = dict(os.environ)
        os.environ.update(cluster.environ())
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def submit_urgent(runs: Path, *, partition: str, nodes: Sequence[str], seconds: int) -> PausableJob:
    """A job that wants these nodes for itself."""
    executor = Executor(runs)
    executor.update_parameters(
        job_name="urgent",
        partition=partition,
        timeout_min=5,
        nodes=len(nodes),
        exclusive=True,
        additional_parameters={"nodelist": ",".join(nodes)},
    )
    job = executor.submit(time.sleep, seconds)
    assert isinstance(job, PausableJob)
    say(f"submitted job {job.job_id} (urgent) to {partition}, for the same whole node")
    return job


def start_process(run: RunDir, script: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A training script as a plain process that is preemptible; its log is appended to."""
    command = [sys.executable, "-u", str(script), *arguments]
    environ = {**os.environ, PREEMPT_ENV: "requeue", RUN_DIR_ENV: str(run.root)}
    with (run.logs / "out.txt").open("ab") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
