"""``hydroslurm prove``: does a stopped script's training equal an undisturbed one, bit for bit?"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.shared import AsJson
from hydroslurm.cli.submit import note_misplaced
from hydroslurm.core.files import clean

if TYPE_CHECKING:
    from hydroslurm.prove.trial import Proof


def prove(
    context: typer.Context,
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="train.py or a command, and its arguments."),
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 40,
    stops: Annotated[int, typer.Option(help="How often to stop it.")] = 3,
    seed: Annotated[int, typer.Option(help="Chooses the steps to stop after.")] = 0,
    grace: Annotated[float, typer.Option(metavar="S", help="From SIGTERM to SIGKILL.")] = 30.0,
    limit: Annotated[
        float, typer.Option(metavar="S", help="For one step, start included.")
    ] = 300.0,
    link: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="A folder that it reads by this relative path."),
    ] = None,
    slurm: Annotated[
        str | None,
        typer.Option(
            metavar="OPTIONS",
            help="Run it as a batch job with these options of sbatch, such as '-p low -n 2', "
            "stopped by scontrol requeue.",
        ),
    ] = None,
    preempt: Annotated[
        str,
        typer.Option(
            metavar="requeue|off", help="off: as it is, without what hydroslurm does for it."
        ),
    ] = "requeue",
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep all that the runs write, here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find out whether a script survives stops bit for bit.

    Runs it whole and stopped, compares every step, and names the first thing that differs.

    hydroslurm prove train.py --lr 0.1

    hydroslurm prove --steps 100 --stops 6 -- torchrun --nproc-per-node=2 train.py

    The script is run three times: twice undisturbed, to see that it is deterministic at all, and
    once stopped as Slurm does it (SIGTERM to all its processes) and started again with the same
    command, on this machine or, with --slurm, as a job. Samples, losses, random numbers, weights
    and the optimizer's state are compared step by step.

    Each run begins in an empty folder with copies of the files (not the folders) of this one, so
    nothing that the script left here before is used or touched. --link names a folder that it reads
    by a relative path.

    Exit status: 0 the same bits, each step trained once; 1 not.
    """
    from hydroslurm.errors import UsageError
    from hydroslurm.prove.attempts import Script, runnable
    from hydroslurm.prove.trial import prove as run_proof

    if preempt not in ("requeue", "off"):
        raise UsageError(f"unknown --preempt {clean(preempt)!r}; wanted requeue or off")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise UsageError(f"--keep {keep}: wanted a folder that is new or empty")
    script = Script(
        command=runnable(command),
        environ={**os.environ, "HYDROSLURM_PREEMPT": preempt},
        links=tuple(link or ()),
        grace_s=grace,
        limit_s=limit,
        sbatch=None if slurm is None else tuple(shlex.split(slurm)),
    )
    if not as_json:
        typer.echo(f"proving: {shlex.join(script.command)}")
        note_misplaced(context, command[0], command[1:])
    shared = None if slurm is None else Path.cwd()  # visible on the nodes
    with tempfile.TemporaryDirectory(prefix="hydroslurm-prove-", dir=shared) as scratch:
        proof = run_proof(
            script,
            (keep or Path(scratch)).absolute(),
            steps=steps,
            stops=stops,
            seed=seed,
            notice=lambda text: None if as_json else typer.echo(text),
        )
    typer.echo(json.dumps(_as_dict(proof)) if as_json else str(proof))
    if not proof.holds:
        raise typer.Exit(1)


def _as_dict(proof: Proof) -> dict[str, object]:
    result = proof.result
    differences = (result or proof.control).differences
    return {
        "holds": proof.holds,
        "deterministic": proof.control.is_equal,
        "steps": proof.steps,
        "stops": [asdict(stop) for stop in proof.stops],
        "steps_repeated": result.repeated if result else None,
        "steps_left_out": result.left_out if result else None,
        "differences": [asdict(d) for d in differences],
    }
