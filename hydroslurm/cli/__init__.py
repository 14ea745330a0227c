"""``hydroslurm VERB``: verbs of one kind share a file; the only package that prints and exits.

A verb's module imports typer and nothing heavy at its top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import hydroslurm.cli.checkpoint as checkpoint
import hydroslurm.cli.cluster as cluster
import hydroslurm.cli.describe as describe
import hydroslurm.cli.doctor as doctor
import hydroslurm.cli.elastic as elastic
import hydroslurm.cli.gate as gate
import hydroslurm.cli.job as job
import hydroslurm.cli.metrics as metrics
import hydroslurm.cli.prove as prove
import hydroslurm.cli.report as report
import hydroslurm.cli.spank as spank
import hydroslurm.cli.spec as spec
import hydroslurm.cli.status as status
import hydroslurm.cli.submit as submit
import hydroslurm.cli.top as top
from hydroslurm.core.files import clean
from hydroslurm.errors import HydroslurmError, UsageError

app = typer.Typer(
    name="hydroslurm",
    help="Make PyTorch training on Slurm preemptible: park it between two operators and continue "
    "it in place, or save, requeue and resume.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # boxes and colours would take half the time of --help
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from hydroslurm import __version__

        typer.echo(f"hydroslurm {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Not shown: the app has a help of its own."""


app.command(
    "submit",
    short_help="Submit a job spec or a script, preemptible.",
    context_settings=submit.CONTEXT,
)(submit.submit)
app.command(
    "run",
    short_help="Run an unmodified program so that it can be paused.",
    context_settings=submit.RUN_CONTEXT,
)(submit.run)
app.command(
    "agent",
    short_help="Start ranks as torchrun does, and forward signals to them.",
    context_settings=submit.CONTEXT,
)(submit.agent)
app.command("pause", short_help="Park a process or a job between two operators.")(job.pause)
app.command("resume", short_help="Resume a paused process or job in place.")(job.resume)
app.command("requeue", short_help="Make a job save and requeue.")(job.requeue)
app.command("scale", short_help="Change how many members an elastic job has.")(elastic.scale)
app.command("status", short_help="Show a job's state, from Slurm and from its ranks.")(
    status.status
)
app.command("top", short_help="Show all my jobs live.")(top.top)
app.command("metrics", short_help="Export Prometheus metrics for my jobs.")(metrics.metrics)
app.command("validate", short_help="Check job specs, ours or T9k's.")(spec.validate)
app.command("render", short_help="Print the batch script that submit would hand to sbatch.")(
    spec.render
)
app.command("schema", short_help="Print the JSON Schema of a job spec.")(spec.schema)
app.command("describe", short_help="Show what was asked for and what became of it.")(
    describe.describe
)
app.command("list", short_help="List my hydroslurm jobs.")(describe.list_jobs)
app.command("cancel")(job.cancel)
app.command("logs")(job.logs)
app.command("attach", short_help="Get a shell where a replica runs.")(job.attach)
app.command("doctor", short_help="Explain what a preemption does here, and what is risky.")(
    doctor.doctor
)
app.command("report", short_help="Show every pause and stop of a run with its latencies.")(
    report.report
)
app.command(
    "prove",
    short_help="Find out whether a script survives stops bit for bit.",
    context_settings=submit.RUN_CONTEXT,
)(prove.prove)
app.add_typer(
    checkpoint.checkpoint_app,
    name="checkpoint",
    help="List, verify and export what a run has saved.",
)
app.add_typer(gate.app, name="gate", help="Build and inspect the operator gate.")
app.add_typer(
    cluster.app,
    name="cluster",
    help="A private Slurm on this machine, for trying and testing only.",
)
app.add_typer(
    spank.spank_app,
    name="spank",
    help="Build, install or uninstall srun's option --preempt.",
)


def main() -> None:
    """Run the command line; our own errors become one line on stderr and exit status 1."""
    try:
        app()
    except (HydroslurmError, UsageError) as error:
        message = "\n".join(clean(line, most=2000) for line in str(error).split("\n"))
        print(f"hydroslurm: {message}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(141)
