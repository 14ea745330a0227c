"""Act 2 of the demo: trainings that are stopped, saved, requeued, and go on where they were.

demo_train.py, three times with the same seed: left alone; preempted by urgent jobs; and requeued by
a user and by an operator, with a suspend in between. All three end with the same weights, the same
optimizer, the same loss in every step, and every sample seen once in every epoch.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_stage import (
    EXAMPLES,
    console,
    pace,
    private_slurm,
    say,
    start_process,
    submit_urgent,
    tell,
    wait_for_end,
    wait_for_state,
)
from demo_watch import tell_stop, wait_for_attempt, wait_for_step
from rich import box
from rich.table import Table

from hydroslurm.core.exitcodes import RUN_AGAIN
from hydroslurm.core.rundir import RunDir
from hydroslurm.jobs.launch.executor import Executor, PausableJob
from hydroslurm.jobs.requests import pause_job, requeue_job, resume_job
from hydroslurm.report.figures import Report
from hydroslurm.report.history import History
from hydroslurm.report.reading import read_history
from hydroslurm.report.views import in_terminal, stop_sentences, stops_table
from hydroslurm.report.writing import write_figures, write_timeline
from hydroslurm.slurm.client import open_client

TRAIN = EXAMPLES / "demo_train.py"
STEPS_PER_EPOCH = 23
SHARES = (0.15, 0.4)
"""How much of the training is done when it is stopped."""
NODES = {"alone": "n1", "preempted": "n2", "requeued": "n3"}
"""On the private Slurm each has its own node: an urgent job meets the one that it is for."""


@dataclass(frozen=True)
class Trained:
    """What one training left behind; ``result`` is the JSON of demo_train.py."""

    title: str
    run: RunDir
    result: Mapping[str, Any]


def private_act(folder: Path, *, epochs: int) -> bool:
    with private_slurm("requeue", folder / "cluster", nodes=len(NODES)):
        return conclude(_OnSlurm(folder, "low", "urgent", epochs, NODES).side_by_side())


def site_act(folder: Path, *, low: str, urgent: str, epochs: int) -> bool:
    """One training after the other, so that an urgent job stops only the one that it is for."""
    say(f"talking to Slurm by {open_client().why}")
    return conclude(_OnSlurm(folder, low, urgent, epochs, {}).one_by_one())


def local_act(folder: Path, *, epochs: int) -> bool:
    """The same without Slurm: ended with SIGTERM and started again."""
    say("no Slurm: the same training as plain processes; SIGTERM ends one, and it is started again")
    runs = {name: RunDir(folder / "runs" / name).create() for name in ("alone", "stopped")}
    outs = {name: folder / f"{name}.json" for name in runs}

    def start(name: str) -> subprocess.Popen[bytes]:
        where = ("--directory", str(runs[name].root))
        return start_process(runs[name], TRAIN, *where, *_options(outs[name], epochs))

    running = {name: start(name) for name in runs}
    try:
        for number, share in enumerate(SHARES, start=1):
            wait_for_attempt(runs["stopped"], "stopped", number)
            wait_for_step(runs["stopped"], "stopped", _step(share, epochs))
            say(f"SIGTERM to process {running['stopped'].pid}")
            running["stopped"].send_signal(signal.SIGTERM)
            tell_stop(runs["stopped"], "stopped", number)
            wait_for_end(running["stopped"], runs["stopped"], status=RUN_AGAIN)
            running["stopped"] = start("stopped")
            say(f"started again, as process {running['stopped'].pid}")
        for name, process in running.items():
            wait_for_end(process, runs[name])
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
    return conclude([_trained(name, run, outs[name]) for name, run in runs.items()])


class _OnSlurm:
    """The act on one Slurm, whose programs are on the PATH."""

    def __init__(
        self, folder: Path, low: str, urgent: str, epochs: int, nodes: Mapping[str, str]
    ) -> None:
        self.folder = folder
        self.low = low
        self.urgent = urgent
        self.epochs = epochs
        self.nodes = nodes
        self.client = open_client()
        self.jobs: dict[str, PausableJob] = {}

    def side_by_side(self) -> list[Trained]:
        self.introduce()
        self.submit("alone")
        for _ in zip(self.preempt_twice(), self.requeue_twice(), strict=True):
            pass
        return self.results()

    def one_by_one(self) -> list[Trained]:
        self.introduce()
        self.submit("alone").result()
        for stops in (self.preempt_twice(), self.requeue_twice()):
            for _ in stops:
                pass
        return self.results()

    def preempt_twice(self) -> Iterator[None]:
        """Yields after the submission and after each stop, so that others can go on meanwhile."""
        job = self.submit("preempted")
        yield
        for attempt, share in enumerate(SHARES, start=1):
            self.wait_for(job, "preempted", attempt, share)
            nodes = self.client.job(int(job.job_id)).nodes
            runs = self.folder / "runs"
            urgent = submit_urgent(runs, partition=self.urgent, nodes=nodes, seconds=1)
            tell_stop(job.run_dir, "preempted", attempt)
            yield
            urgent.result()

    def requeue_twice(self) -> Iterator[None]:
        """As :meth:`preempt_twice`."""
        job = self.submit("requeued")
        job_id = int(job.job_id)
        yield
        self.wait_for(job, "requeued", 1, SHARES[0])
        say(f"hydroslurm requeue {job_id}")
        requeue_job(self.client, self.client.job(job_id), timeout_s=6 * pace.answer_s)
        tell_stop(job.run_dir, "requeued", 1)
        yield
        self.wait_for(job, "requeued", 2, SHARES[1])
        tell(pause_job(self.client, self.client.job(job_id), timeout_s=pace.answer_s))
        time.sleep(0.5)
        tell(resume_job(self.client, self.client.job(job_id), timeout_s=pace.answer_s))
        # in the two seconds before SIGSTOP Slurm only notes a resume, and a requeue that comes
        # before it has happened kills the job step without a word
        wait_for_state(job.run_dir, "running", pauses=1)
        say(f"scontrol requeue {job_id}")
        self.client.requeue(self.client.job(job_id))
        tell_stop(job.run_dir, "requeued", 2)
        yield

    def wait_for(self, job: PausableJob, name: str, attempt: int, share: float) -> None:
        """Until this attempt trains, and the training has come so far."""
        wait_for_attempt(job.run_dir, name, attempt)
        wait_for_step(job.run_dir, name, _step(share, self.epochs))

    def submit(self, name: str) -> PausableJob:
        executor = Executor(self.folder / "runs")
        executor.update_parameters(
            job_name=name, partition=self.low, timeout_min=120, cpus_per_task=1
        )
        if name in self.nodes:
            executor.update_parameters(additional_parameters={"nodelist": self.nodes[name]})
        job = executor.submit_script(str(TRAIN), *_options(self.out(name), self.epochs))
        say(f"submitted job {job.job_id} ({name}) to partition {self.low}")
        self.jobs[name] = job
        return job

    def out(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def introduce(self) -> None:
        say(
            "three trainings, same seed: [cyan]alone[/] is left alone, [cyan]preempted[/] meets "
            "urgent jobs, [cyan]requeued[/] a user, a suspend and an operator"
        )

    def results(self) -> list[Trained]:
        say("nothing stops them any more")
        for job in self.jobs.values():
            job.result()
        return [_trained(name, job.run_dir, self.out(name)) for name, job in self.jobs.items()]


def _step(share: float, epochs: int) -> int:
    return round(share * epochs * STEPS_PER_EPOCH)


def _options(out: Path, epochs: int) -> list[str]:
    think = ("--think-s", pace.nap(0.03))
    return ["--epochs", str(epochs), "--log-every", "5", *think, "--out", str(out)]


def _trained(title: str, run: RunDir, out: Path) -> Trained:
    return Trained(title, run, json.loads(out.read_text()))


# --- the end
# ------------------------------------------------------------------------------------------------


def conclude(trained: Sequence[Trained]) -> bool:
    """Print the tables and the pictures' paths; True when all went as promised."""
    histories = {one.title: read_history(one.run.root) for one in trained}
    pictures = [_show(one, histories[one.title]) for one in trained[1:]]
    console.print()
    console.print(_results_table(trained, histories))
    stops = sum(len(history.stops) for history in histories.values())
    same = all(one.result == two.result for one, two in itertools.pairwise(trained))
    whole = all(one.result["every_sample_once"] for one in trained)
    alone = not histories[trained[0].title].stops
    kept = same and whole and alone and stops > 0
    if kept:
        console.print(
            f"[green]the same weights, optimizer and losses, bit for bit, after {stops} stops[/]"
        )
    else:
        console.print(
            f"[red]equal: {same}; every sample once: {whole}; stops: {stops}; the first was left "
            f"alone: {alone}[/]"
        )
    for picture in pictures:
        console.print(f"timeline: {picture}", soft_wrap=True)
    return kept


def _results_table(trained: Sequence[Trained], histories: Mapping[str, History]) -> Table:
    table = Table(title="results", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for heading in ("training", "stops", "accuracy", "weights", "optimizer", "losses"):
        table.add_column(heading)
    table.add_column("every sample once")
    for one in trained:
        result = one.result
        hashes = [result[f"{name}_sha256"][:8] for name in ("weights", "optimizer", "losses")]
        table.add_row(
            one.title,
            str(len(histories[one.title].stops)),
            f"{result['accuracy']:.4f}",
            *hashes,
            "yes" if result["every_sample_once"] else "[red]no[/]",
        )
    return table


def _show(one: Trained, history: History) -> Path:
    """The table of one training's stops; returns its picture."""
    report = Report(history)
    console.print()
    console.print(f"[bold]{one.title}[/]")
    console.print(in_terminal(stops_table(report)))
    for sentence in stop_sentences(report):
        console.print(sentence)
    write_figures(report.figures, one.run.figures_json)
    return write_timeline(history, one.run.timeline_png)
