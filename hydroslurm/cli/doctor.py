"""``hydroslurm doctor [JOBID]``: what this site does to a job, and whether a save fits."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.shared import AsJson

if TYPE_CHECKING:
    from hydroslurm.observe.doctor.facts import Facts, Finding

Which = Annotated[
    str | None,
    typer.Argument(metavar="JOB", help="A job: 12, or 12_3 of an array. Default: a planned one."),
]
PartitionName = Annotated[
    str, typer.Option("--partition", "-p", help="Partition of a planned job. Default: the site's.")
]
QosName = Annotated[str, typer.Option("--qos", "-q", help="QOS of a planned job.")]
Run = Annotated[
    Path | None,
    typer.Option("--run", help="A run folder: how long its saves take, and who can write to it."),
]
SaveS = Annotated[
    float | None, typer.Option("--save-s", min=0.0, help="How long a save takes, seconds.")
]
StateBytes = Annotated[
    int | None, typer.Option("--state-bytes", min=0, help="Size of the state, to be shown.")
]
ScriptFile = Annotated[Path | None, typer.Option("--script", help="Batch script of a planned job.")]
SuspendS = Annotated[
    float | None,
    typer.Option("--suspend-s", min=0.0, help="The longest suspend to survive, seconds."),
]


def doctor(
    job_id: Which = None,
    partition: PartitionName = "",
    qos: QosName = "",
    run: Run = None,
    save_s: SaveS = None,
    state_bytes: StateBytes = None,
    script: ScriptFile = None,
    suspend_s: SuspendS = None,
    as_json: AsJson = False,
) -> None:
    """Explain what a preemption does here, and what is risky.

    How long each kind of stop leaves to save, and which setting to change. Exit status 1: work
    would be lost; 2: Slurm could not be asked.
    """
    from hydroslurm.core.jobid import JobId
    from hydroslurm.errors import HydroslurmError, UsageError
    from hydroslurm.observe.doctor import findings
    from hydroslurm.observe.doctor.facts import SaveFacts
    from hydroslurm.observe.doctor.gather import gather, read_file, why_no_munge
    from hydroslurm.slurm.client import open_client
    from hydroslurm.vacate.policy import why_not_here

    try:
        if run is not None and save_s is not None:
            raise UsageError("give either --run or --save-s, not both")
        if run is not None and not run.is_dir():
            raise UsageError(f"--run {run}: no such folder; wanted a run folder")
        facts = gather(
            open_client(),
            job_id=None if job_id is None else JobId.parse(job_id),
            partition=partition,
            qos=qos,
            script=None if script is None else read_file(script),
            run=run,
        )
    except (HydroslurmError, UsageError) as error:
        # not the usual 1, which means that work would be lost
        typer.echo(f"hydroslurm: {error}", err=True)
        raise typer.Exit(2) from error
    facts = replace(
        facts,
        save=facts.save if save_s is None else SaveFacts(save_s=save_s, state_bytes=state_bytes),
        suspend_s=suspend_s,
        no_munge=why_no_munge(os.environ),
        no_vacate=why_not_here(),
    )
    results = findings.diagnose(facts)
    if as_json:
        typer.echo(json.dumps(findings.as_json(facts, results)))
    else:
        _print(facts, results)
    if findings.work_would_be_lost(results):
        raise typer.Exit(1)


def _print(facts: Facts, results: tuple[Finding, ...]) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from hydroslurm.observe.doctor.findings import LABELS

    console = Console(highlight=False)
    console.print(_headline(facts), markup=False)
    times = Table("stop", "seconds", "because", box=None, pad_edge=False)
    for reason, left in facts.stops():
        times.add_row(LABELS[reason], f"{left.seconds:.1f}", left.why)
    console.print()
    console.print("Minimum time from the first signal to SIGKILL:")
    console.print(times)
    console.print()
    for finding in results:
        severity = finding.severity.value
        console.print(f"[{_STYLES[severity]}]{severity:<5}[/] {finding.title}")
        for message in filter(None, (finding.explanation, finding.fix and f"-> {finding.fix}")):
            console.print(Padding(Text(message), (0, 0, 0, 6)))


def _headline(facts: Facts) -> str:
    version = facts.config.get("SLURM_VERSION", "of an unknown release")
    what = f"job {facts.job.id}" if facts.job else "a planned job"
    qos = f", QOS {facts.qos}" if facts.qos else ""
    cluster = facts.config.cluster_name
    return f"{what} in partition {facts.partition.name}{qos} of {cluster} (Slurm {version})"


_STYLES = {"ok": "green", "note": "cyan", "risk": "yellow", "loss": "bold red"}
