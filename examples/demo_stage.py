"""What all acts of the demo stand on: the narrator, the pace, waiting, and a private Slurm."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from hydroslurm.core.rundir import RUN_DIR_ENV, RunDir
from hydroslurm.core.status import read_status
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.spec import Profile
from hydroslurm.errors import HydroslurmError
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.jobs.requests import JobAnswer
from hydroslurm.runtime.autoload import PREEMPT_ENV

EXAMPLES = Path(__file__).resolve().parent
console = Console(highlight=False)
ORDINARY_S = 2.0
"""From the start of Python to the first step of train.py, on two quiet cores."""
LIMIT_S = 400.0
"""What a wait may take there: at a site with default settings a requeue takes over two minutes."""
TAIL_LINES = 10


def say(text: str) -> None:
    console.print(f"[bold]demo[/]  {text}", soft_wrap=True)


def tell(answer: JobAnswer) -> None:
    words = "; ".join(one.message for one in answer.answers) or "no answer in time"
    say(f"{answer.how} {answer.job_id}: {words}")


class Pace:
    """How much slower than an ordinary machine this one is now: waits and trainings last longer.

    Attributes:
        answer_s: how long a rank may take to answer.
    """

    slowness = 1.0

    @property
    def answer_s(self) -> float:
        return 10.0 * self.slowness

    def nap(self, seconds: float) -> str:
        """An option for a sleep in each step: a training outlasts what the demo does meanwhile."""
        return f"{seconds * max(1.0, 0.4 * self.slowness):.3f}"

    def measure(self) -> float:
        """Time a first step, Python's start included; returns the seconds."""
        began_s = time.monotonic()
        run_to_end(str(EXAMPLES / "train.py"), "--iterations", "1")
        took_s = time.monotonic() - began_s
        self.slowness = max(1.0, took_s / ORDINARY_S)
        return took_s


pace = Pace()


def run_to_end(*arguments: str) -> str:
    """What a Python program prints.

    Raises:
        HydroslurmError: it failed.
    """
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HydroslurmError(f"{' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def wait_for(what: str, condition: Callable[[], bool], *, run: Path) -> None:
    """Wait, and say so every 20 s.

    Args:
        run: a folder whose newest log shows why it takes so long.

    Raises:
        HydroslurmError: it took too long for this machine.
    """
    began_s = time.monotonic()
    next_word_s = 20.0
    while not condition():
        waited_s = time.monotonic() - began_s
        if waited_s > LIMIT_S * pace.slowness:
            raise HydroslurmError(f"waited {waited_s:.0f} s for {what}. {last_words(run)}")
        if waited_s > next_word_s:
            line = last_words(run).splitlines()[-1].strip()
            say(escape(f"waiting for {what}: {waited_s:.0f} s. {line}"))
            next_word_s += 20.0
        time.sleep(0.1)


def last_words(run: Path) -> str:
    """The end of the newest log below a folder, with its name."""
    logs = [path for path in _logs(run) if path.stat().st_size]
    if not logs:
        return f"There is no log in {run} yet"
    newest = max(logs, key=lambda path: path.stat().st_mtime)
    tail = newest.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n  ".join([f"The end of {newest}:", *tail])


def wait_for_state(run: RunDir, state: str, *, pauses: int = 0) -> None:
    def reached() -> bool:
        now = read_status(run.rank_status(0))
        return now is not None and now.state == state and now.pauses >= pauses

    wait_for(f"rank 0 of {run.root.name} to be {state}", reached, run=run.root)


def wait_for_end(process: subprocess.Popen[bytes], run: RunDir, *, status: int = 0) -> None:
    """Until a training of :func:`start_process` has ended with this status."""
    name = run.root.name
    wait_for(f"{name} to end", lambda: process.poll() is not None, run=run.root)
    if process.returncode != status:
        raise HydroslurmError(
            f"the training {name} ended with status {process.returncode}, not {status}. "
            f"{last_words(run.root)}"
        )


def log_lines(run: RunDir) -> list[str]:
    """What the ranks have printed so far."""
    logs = [path for path in _logs(run.logs) if path.suffix in (".out", ".txt")]
    return [line for log in logs for line in log.read_text().splitlines()]


def _logs(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*"))
    return [path for path in found if path.suffix in (".out", ".err", ".log", ".txt")]


@contextlib.contextmanager
def private_slurm(profile: Profile, folder: Path, *, nodes: int) -> Iterator[None]:
    """Within it the Slurm programs and this process talk to a Slurm of their own."""
    say(f"starting a private Slurm of {nodes} nodes on this machine (for trying and testing only)")
    began = time.monotonic()
    spec = ClusterSpec(
        nodes=nodes, profile=profile, directory=folder, grace_s=round(5 * pace.slowness)
    )
    with DevCluster.up(spec) as cluster:
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
        timeout_min=60,
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
