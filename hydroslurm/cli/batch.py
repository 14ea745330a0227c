"""``hydroslurm batch | template``: what a batch script runs, and batch scripts to begin with."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer


def batch(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="srun and its arguments, after --.", show_default=False
        ),
    ] = None,
    ended: Annotated[
        int | None,
        typer.Option(
            metavar="STATUS", help="Decide for ranks that have ended with this status; no COMMAND."
        ),
    ] = None,
) -> None:
    """Run srun in a batch script; requeue what its ranks cannot.

    exec hydroslurm batch -- srun python train.py

    The job is requeued if the ranks saved and could not ask for it (status 75), and if a preemption
    ended them before they could save (143), while Python still imports for example; never if it was
    cancelled, or if a rank failed. Where Slurm does it by itself, it is left to Slurm. Exits with
    the status of COMMAND.

    SIGTERM, SIGURG, SIGUSR1 and SIGUSR2 that reach the batch shell alone (--signal=B:..., scancel
    --batch) are passed on to the ranks. HYDROSLURM_PREEMPT=requeue is set for them, unless the
    variable is there.
    """
    from hydroslurm.errors import UsageError
    from hydroslurm.jobs.launch.batch import requeue_if_due, run_batch

    if (ended is None) == (not command):
        raise UsageError("wanted a command: hydroslurm batch -- srun python train.py")
    status = requeue_if_due(ended, os.environ) if ended is not None else 0
    sys.exit(run_batch(command, os.environ) if command else status)
