"""The main job, from start to end: `make demo`.

Starts a private Slurm on this machine, submits examples/train.py to its preemptible partition
through submitit, suspends and resumes it with scontrol, lets an urgent job preempt a second one by
gang scheduling, and shows that both end with the very weights of a run that was never paused.

    --local   without Slurm: the same training as a plain process, paused by its pid
    --site    on the Slurm of this site instead of a private one; asks you for the two partitions
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from submitit.core.utils import UncompletedJobError

from hydroslurm import client
from hydroslurm.devcluster import ClusterSpec, DevCluster
from hydroslurm.devcluster.programs import missing, search_path
from hydroslurm.errors import HydroslurmError, UsageError
from hydroslurm.launch.control import JobAnswer, pause_job, resume_job
from hydroslurm.launch.executor import Executor, PausableJob
from hydroslurm.rankstate import RankState, latest
from hydroslurm.report.figures import figures_of, write_figures
from hydroslurm.report.history import read_history
from hydroslurm.report.table import pauses_table
from hydroslurm.report.timeline import write_timeline
from hydroslurm.rundir import RunDir
from hydroslurm.slurm.client import JobState, open_client

TRAIN = Path(__file__).resolve().parent / "train.py"
console = Console(highlight=False)


@dataclass(frozen=True)
class Trained:
    """What one training left behind."""

    title: str
    run: RunDir
    accuracy: float
    weights: str


def say(text: str) -> None:
    console.print(f"[bold]demo[/]  {text}", soft_wrap=True)


def wait_for(what: str, condition: Callable[[], bool], *, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise HydroslurmError(
                f"waited {limit_s:g} s for {what}; look at the logs in the run folder"
            )
        time.sleep(0.02)


def rank_state(run: RunDir) -> RankState | None:
    return latest(run.rank_events(0))


def wait_for_state(run: RunDir, state: str, *, pauses: int = 0) -> None:
    def reached() -> bool:
        now = rank_state(run)
        return now is not None and now.state == state and now.pauses >= pauses

    wait_for(f"rank 0 of {run.root.name} to be {state}", reached)


def steps_shown(run: RunDir) -> int:
    """How many lines about steps the ranks have printed so far."""
    logs = [path for path in run.logs.iterdir() if path.suffix in (".out", ".txt")]
    return sum(line.startswith("step") for log in logs for line in log.read_text().splitlines())


def wait_for_training(run: RunDir, *, lines: int = 4) -> None:
    """Until the training has made some more steps, as its log shows it."""
    before = steps_shown(run)
    wait_for("some training steps", lambda: steps_shown(run) >= before + lines)


def result_of(title: str, run: RunDir, out: Path) -> Trained:
    result = json.loads(out.read_text())
    return Trained(title, run, float(result["accuracy"]), str(result["weights_sha256"]))


# --- with Slurm
# -----------------------------------------------------------------------------------------------


class SlurmDemo:
    """The demo on one Slurm, whose programs are on the PATH."""

    def __init__(self, folder: Path, low: str, urgent: str, train: Sequence[str]) -> None:
        self.folder = folder
        self.low = low
        self.urgent = urgent
        self.train = tuple(train)
        self.client = open_client()

    def run(self) -> list[Trained]:
        say(
            "three trainings, same seed: [cyan]plain[/] is never paused, [cyan]suspended[/] meets "
            "scontrol, [cyan]preempted[/] meets an urgent job"
        )
        plain = self.submit("plain")
        suspended = self.submit("suspended")
        self.suspend_twice(suspended)
        plain.result()
        suspended.result()
        preempted = self.submit("preempted")
        self.preempt(preempted)
        preempted.result()
        jobs = {"plain": plain, "suspended": suspended, "preempted": preempted}
        return [result_of(name, job.run_dir, self.out(name)) for name, job in jobs.items()]

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def submit(self, name: str) -> PausableJob:
        executor = Executor(self.folder / "runs")
        executor.update_parameters(
            job_name=name, partition=self.low, timeout_min=20, cpus_per_task=1
        )
        job = executor.submit_script(str(TRAIN), *self.train, "--out", str(self.out(name)))
        say(f"submitted job {job.job_id} ({name}) to partition {self.low}")
        return job

    def suspend_twice(self, job: PausableJob) -> None:
        for hold_s in (0.5, 3.0):
            wait_for_training(job.run_dir)
            answer = pause_job(self.client, int(job.job_id))
            self.tell(answer)
            if hold_s > 2:
                say(f"held for {hold_s:g} s: after 2 s Slurm stops the processes, too (SIGSTOP)")
            time.sleep(hold_s)
            self.tell(resume_job(self.client, int(job.job_id)))

    def tell(self, answer: JobAnswer) -> None:
        words = "; ".join(one.words for one in answer.answers) or "no answer in time"
        say(f"{answer.how} {answer.job_id}: {words}")

    def preempt(self, job: PausableJob) -> None:
        wait_for_training(job.run_dir)
        executor = Executor(self.folder / "runs")
        nodes = self.client.job(int(job.job_id)).nodes
        executor.update_parameters(
            job_name="urgent",
            partition=self.urgent,
            timeout_min=5,
            nodes=1,
            exclusive=True,
            additional_parameters={"nodelist": ",".join(nodes)},
        )
        urgent = executor.submit(time.sleep, 3)
        say(f"submitted job {urgent.job_id} (urgent) to {self.urgent}, for the same whole node")
        wait_for_state(job.run_dir, "parked", pauses=1)
        slurm_state = self.client.job(int(job.job_id)).state
        say(f"job {job.job_id} is parked; Slurm says {slurm_state.value}, the urgent job runs")
        urgent.result()
        wait_for_state(job.run_dir, "running", pauses=1)
        if slurm_state is not JobState.SUSPENDED:
            say("[yellow]note[/]: Slurm had not yet written the suspension down when it was asked")
        say(f"the urgent job has ended; job {job.job_id} goes on where it was")


def slurm_demo(folder: Path, train: Sequence[str], *, low: str, urgent: str) -> list[Trained]:
    say(f"talking to Slurm by {open_client().why}")
    return SlurmDemo(folder, low, urgent, train).run()


def private_demo(folder: Path, train: Sequence[str]) -> list[Trained]:
    say("starting a private Slurm of two nodes on this machine (for trying and testing only)")
    began = time.monotonic()
    spec = ClusterSpec(nodes=2, profile="pause", directory=folder / "cluster")
    with DevCluster.up(spec) as cluster:
        up_s = time.monotonic() - began
        say(f"up after {up_s:.1f} s: munge, MariaDB, slurmdbd, slurmctld, two slurmd")
        before = dict(os.environ)
        os.environ.update(cluster.environ())
        try:
            return slurm_demo(folder, train, low="low", urgent="urgent")
        finally:
            os.environ.clear()
            os.environ.update(before)


# --- without Slurm
# --------------------------------------------------------------------------------------------


def local_demo(folder: Path, train: Sequence[str]) -> list[Trained]:
    say("no Slurm: the same training as plain processes, paused by pid with SIGUSR1 and SIGUSR2")
    outs = {name: folder / f"{name}.json" for name in ("plain", "paused")}
    runs = {name: RunDir(folder / "runs" / name).create() for name in outs}
    processes = {name: _start(runs[name], outs[name], train) for name in outs}
    try:
        for hold_s in (0.3, 1.0, 2.0):
            wait_for_training(runs["paused"])
            pid = processes["paused"].pid
            say(f"pause --pid {pid}: {client.pause(pid).words}")
            time.sleep(hold_s)
            say(f"resume --pid {pid}: {client.resume(pid).words}")
        for name, process in processes.items():
            if process.wait(600) != 0:
                raise HydroslurmError(
                    f"the {name} training failed; see {runs[name].logs / 'out.txt'}"
                )
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
    return [result_of(name, runs[name], outs[name]) for name in outs]


def _start(run: RunDir, out: Path, train: Sequence[str]) -> subprocess.Popen[bytes]:
    code = (
        "import sys; from pathlib import Path; from hydroslurm.launch.rank import InRank, Script; "
        "InRank(Script(sys.argv[2], tuple(sys.argv[3:])), Path(sys.argv[1]))()"
    )
    command = [
        sys.executable,
        "-u",
        "-c",
        code,
        str(run.root),
        str(TRAIN),
        *train,
        "--out",
        str(out),
    ]
    with (run.logs / "out.txt").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


# --- the end
# --------------------------------------------------------------------------------------------------


def conclude(trained: Sequence[Trained]) -> bool:
    """Print the tables and the pictures' paths; True when all went as promised."""
    pictures = []
    pauses = 0
    for one in trained[1:]:
        history = read_history(one.run.root)
        console.print()
        console.print(f"[bold]{one.title}[/]")
        console.print(pauses_table(history))
        write_figures(figures_of(history), one.run.figures_json)
        pictures.append(write_timeline(history, one.run.timeline_png))
        pauses += sum(len(life.pauses) for life in history.lives)
    table = Table(title="results")
    for heading in ("training", "accuracy", "sha256 of the final weights"):
        table.add_column(heading)
    for one in trained:
        table.add_row(one.title, f"{one.accuracy:.4f}", one.weights[:32] + "…")
    console.print()
    console.print(table)
    same = len({one.weights for one in trained}) == 1
    if same and pauses:
        console.print(f"[green]the same weights, bit for bit, after {pauses} pauses[/]")
    else:
        console.print(f"[red]weights equal: {same}; pauses: {pauses}[/]")
    for picture in pictures:
        console.print(f"timeline: {picture}", soft_wrap=True)
    return same and pauses > 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--local", action="store_true", help="without Slurm")
    parser.add_argument("--site", action="store_true", help="on this site's Slurm")
    parser.add_argument("--low", help="with --site: the preemptible partition")
    parser.add_argument("--urgent", help="with --site: the partition that preempts it")
    parser.add_argument(
        "--dir", type=Path, default=Path(".hydroslurm/demo"), help="default: %(default)s"
    )
    parser.add_argument(
        "--iterations", type=int, default=3000, help="training steps, default %(default)s"
    )
    chosen = parser.parse_args(arguments)
    if chosen.site and not (chosen.low and chosen.urgent):
        parser.error("--site needs --low PARTITION and --urgent PARTITION")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    folder = (chosen.dir / time.strftime("%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    train = ("--iterations", str(chosen.iterations))
    local = chosen.local
    if not (local or chosen.site) and missing(search_path(os.environ.get("PATH"))):
        say("[yellow]Slurm is not installed here: the demo goes on as a local process[/]")
        local = True
    try:
        if local:
            trained = local_demo(folder, train)
        elif chosen.site:
            trained = slurm_demo(folder, train, low=chosen.low, urgent=chosen.urgent)
        else:
            trained = private_demo(folder, train)
    except (HydroslurmError, UsageError, UncompletedJobError) as error:
        console.print(f"[red]demo failed:[/] {error}", soft_wrap=True)
        return 1
    return 0 if conclude(trained) else 1


if __name__ == "__main__":
    sys.exit(main())
