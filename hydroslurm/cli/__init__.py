"""``hydroslurm VERB``: one file per verb; the only package that prints and exits.

A verb's module imports typer and nothing heavy at its top, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys

import typer

import hydroslurm.cli.agent as agent
import hydroslurm.cli.checkpoint as checkpoint
import hydroslurm.cli.cluster as cluster
import hydroslurm.cli.doctor as doctor
import hydroslurm.cli.gate as gate
import hydroslurm.cli.job as job
import hydroslurm.cli.report as report
import hydroslurm.cli.run as run
import hydroslurm.cli.spank as spank
import hydroslurm.cli.spec as spec
import hydroslurm.cli.submit as submit
import hydroslurm.cli.trainingjob as trainingjob
from hydroslurm.errors import HydroslurmError, UsageError

app = typer.Typer(
    name="hydroslurm",
    help="Make PyTorch training on Slurm preemptible: park it between two operators and continue "
    "it in place, or save, requeue and go on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("submit", context_settings=submit.CONTEXT)(submit.submit)
app.command("run", context_settings=run.CONTEXT)(run.run)
app.command("agent", context_settings=agent.CONTEXT)(agent.agent)
app.command("pause")(job.pause)
app.command("resume")(job.resume)
app.command("requeue")(job.requeue)
app.command("status")(job.status)
app.command("validate")(spec.validate)
app.command("render")(spec.render)
app.command("schema")(spec.schema)
app.command("describe")(trainingjob.describe)
app.command("list")(trainingjob.list_jobs)
app.command("cancel")(trainingjob.cancel)
app.command("logs")(trainingjob.logs)
app.command("attach")(trainingjob.attach)
app.command("doctor")(doctor.doctor)
app.command("report")(report.report)
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
    help="The option --preempt of srun, sbatch and salloc: build, install, uninstall.",
)


def main() -> None:
    """Run the command line; errors of ours become one line on stderr and exit status 1."""
    try:
        app()
    except (HydroslurmError, UsageError) as error:
        print(f"hydroslurm: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(141)
