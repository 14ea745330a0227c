"""``hydroslurm agent -- [torchrun options] script.py [args...]``."""

from __future__ import annotations

import logging
import os
import sys

import typer

CONTEXT = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": False,
}
"""Everything after the verb belongs to torchrun."""


def agent(context: typer.Context) -> None:
    """Start ranks as torchrun does, and hand Slurm's signals on to them: pause, resume, stop.

    srun --ntasks-per-node=1 hydroslurm agent -- --nproc-per-node=8 train.py

    Takes torchrun's options (hydroslurm agent -- --help). Without any of --nnodes, --rdzv-* and
    --master-*, the tasks of a job step find each other. The ranks are preemptible, as below srun
    --preempt; HYDROSLURM_PREEMPT=off starts them without.

    Exit status: 0; 75 saved, to be run again; 93 must not be run again; 143 cancelled; a worker
    that leaves with one of these is not restarted. Else that of the first worker that failed for
    good, 128+N for signal N.
    """
    if not context.args:
        typer.echo(context.get_usage(), err=True)
        typer.echo(
            "hydroslurm agent: wanted torchrun's arguments, such as\n"
            "  hydroslurm agent -- --nproc-per-node=8 train.py",
            err=True,
        )
        raise typer.Exit(2)
    from hydroslurm.jobs.agent.launch import run_agent

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("hydroslurm agent: %(message)s"))
    logger = logging.getLogger("hydroslurm.jobs.agent")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    sys.exit(run_agent(context.args, environ=os.environ))
