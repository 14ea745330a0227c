"""Act 1 of the demo: trainings that are paused in place.

An unmodified training (train.py) is suspended and resumed with scontrol, and another one is parked
by gang scheduling for an urgent job. Both end with the weights of one that was never paused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from demo_stage import (
    EXAMPLES,
    console,
    log_lines,
    pace,
    private_slurm,
    say,
    start_process,
    submit_urgent,
    tell,
    wait_for,
    wait_for_end,
    wait_for_state,
)
from rich.table import Table

from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.jobs.requests import pause_job, resume_job
from hydroslurm.report.figures import Report
from hydroslurm.report.reading import read_history
from hydroslurm.report.views import in_terminal, pauses_table
from hydroslurm.report.writing import write_figures, write_timeline
from hydroslurm.runtime import client
from hydroslurm.slurm.client import Job, JobState, SlurmClient, open_client

TRAIN = EXAMPLES / "train.py"
LOG_EVERY = 50
"""Its own default."""


@dataclass(frozen=True)
class Trained:
    """What one training left behind."""

    title: str
    run: RunDir
    accuracy: float
    weights: str


def private_act(folder: Path, *, iterations: int) -> bool:
    with private_slurm("pause", folder / "cluster", nodes=2):
        return slurm_act(folder, low="low", urgent="urgent", iterations=iterations)


def slurm_act(folder: Path, *, low: str, urgent: str, iterations: int) -> bool:
    say(f"talking to Slurm by {open_client().why}")
    train = ("--iterations", str(iterations))
    return _conclude(_OnSlurm(folder, low, urgent, train).run())


def local_act(folder: Path, *, iterations: int) -> bool:
    """The same without Slurm, by pid."""
    say("no Slurm: the same training as plain processes, paused by pid with SIGUSR1 and SIGUSR2")
    train = ("--iterations", str(iterations))
    outs = {name: folder / f"{name}.json" for name in ("plain", "paused")}
    runs = {name: RunDir(folder / "runs" / name).create() for name in outs}
    processes = {
        name: start_process(runs[name], TRAIN, *train, "--out", str(outs[name])) for name in outs
    }
    try:
        for hold_s in (0.3, 1.0, 2.0):
            _wait_for_training(runs["paused"])
            pid = processes["paused"].pid
            say(f"pause --pid {pid}: {client.pause(pid, timeout_s=pace.answer_s).message}")
            time.sleep(hold_s)
            say(f"resume --pid {pid}: {client.resume(pid, timeout_s=pace.answer_s).message}")
        for name, process in processes.items():
            wait_for_end(process, runs[name])
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    return _conclude([_result_of(name, runs[name], outs[name]) for name in outs])


class _OnSlurm:
    """The act on one Slurm, whose programs are on the PATH."""

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
        return [_result_of(name, job.run_dir, self.out(name)) for name, job in jobs.items()]

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def submit(self, name: str) -> PausableJob:
        executor = Executor(self.folder / "runs")
        executor.update_parameters(
            job_name=name, partition=self.low, timeout_min=120, cpus_per_task=1
        )
        job = executor.submit_script(str(TRAIN), *self.train, "--out", str(self.out(name)))
        say(f"submitted job {job.job_id} ({name}) to partition {self.low}")
        return job

    def suspend_twice(self, job: PausableJob) -> None:
        for hold_s in (0.5, 3.0):
            _wait_for_training(job.run_dir)
            tell(pause_job(*self.target(job), timeout_s=pace.answer_s))
            if hold_s > 2:
                say(f"held for {hold_s:g} s: after 2 s Slurm stops the processes, too (SIGSTOP)")
            time.sleep(hold_s)
            tell(resume_job(*self.target(job), timeout_s=pace.answer_s))

    def target(self, job: PausableJob) -> tuple[SlurmClient, Job]:
        return self.client, self.client.job(int(job.job_id))

    def preempt(self, job: PausableJob) -> None:
        _wait_for_training(job.run_dir)
        nodes = self.client.job(int(job.job_id)).nodes
        runs = self.folder / "runs"
        urgent = submit_urgent(runs, partition=self.urgent, nodes=nodes, seconds=3)
        wait_for_state(job.run_dir, "parked", pauses=1)
        slurm_state = self.client.job(int(job.job_id)).state
        say(f"job {job.job_id} is parked; Slurm says {slurm_state.value}, the urgent job runs")
        urgent.result()
        wait_for_state(job.run_dir, "running", pauses=1)
        if slurm_state is not JobState.SUSPENDED:
            say("[yellow]note[/]: Slurm had not yet written the suspension down when it was asked")
        say(f"the urgent job has ended; job {job.job_id} goes on where it was")


def _wait_for_training(run: RunDir, *, lines: int = 4) -> None:
    """Until the training has made some more steps, as its log shows it."""

    def shown() -> int:
        return sum(line.startswith("step") for line in log_lines(run))

    before = shown()
    what = f"{lines * LOG_EVERY} more training steps of {run.root.name}"
    wait_for(what, lambda: shown() >= before + lines, run=run.root)


def _result_of(title: str, run: RunDir, out: Path) -> Trained:
    result = json.loads(out.read_text())
    return Trained(title, run, float(result["accuracy"]), str(result["weights_sha256"]))


def _conclude(trained: Sequence[Trained]) -> bool:
    """Print the tables and the pictures' paths; True when all went as promised."""
    pictures = []
    pauses = 0
    for one in trained[1:]:
        history = read_history(one.run.root)
        report = Report(history)
        console.print()
        console.print(f"[bold]{one.title}[/]")
        console.print(in_terminal(pauses_table(report)))
        write_figures(report.figures, one.run.figures_json)
        pictures.append(write_timeline(history, one.run.timeline_png))
        pauses += sum(len(attempt.pauses) for attempt in history.attempts)
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
