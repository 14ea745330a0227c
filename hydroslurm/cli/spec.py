"""``hydroslurm validate | render | schema``: job specs without asking Slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hydroslurm.cli.submit import FOLDER, RENDER

Files = Annotated[list[Path], typer.Argument(metavar="FILE", help="Job specs.")]


def validate(files: Files) -> None:
    """Check job specs, ours or T9k's.

    Exit status 1 if one has a problem. Does not ask Slurm.
    """
    from hydroslurm.errors import SpecError
    from hydroslurm.jobs.spec.reading import load

    wrong = 0
    for file in files:
        try:
            spec = load(file)
        except SpecError as error:
            typer.echo(str(error), err=True)
            wrong += 1
            continue
        job = spec.job
        kinds = ", ".join(f"{replica.replicas} {replica.type}" for replica in job.replica_specs)
        typer.echo(f"{file}: ok: {job.name}, {kinds}")
        if spec.meaningless:
            typer.echo("  these fields have no effect on Slurm and are ignored:")
        for field in spec.meaningless:
            typer.echo(f"    {field}")
    if wrong:
        raise typer.Exit(1)


def render(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="A job spec; or a script with what submit takes."),
    ],
    folder: Annotated[Path, typer.Option(help="Where run folders would be created.")] = FOLDER,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print the resolved spec instead, with every default.")
    ] = False,
) -> None:
    """Print the batch script that submit would hand to sbatch; nothing is submitted or written.

    hydroslurm render job.yaml

    hydroslurm render --partition low --nodes 2 train.py --lr 0.1
    """
    import os

    from hydroslurm.jobs.spec.reading import dumps, load

    file = Path(words[0])
    if len(words) > 1 or file.suffix not in (".yaml", ".yml"):
        assert context.parent is not None
        command = context.parent.command.commands["submit"]  # type: ignore[attr-defined]
        words = ["--folder", str(folder), *words]
        with command.make_context("render", words, parent=context, obj=RENDER) as inner:
            command.invoke(inner)
        return
    spec = load(file)
    if as_yaml:
        typer.echo(dumps(spec.job), nl=False)
        return
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.jobs.launch.elastic_job import of_one_member
    from hydroslurm.jobs.launch.scripts import job_script, member_script
    from hydroslurm.jobs.launch.training_job import plan_for

    spec = of_one_member(spec)
    plan, notes = plan_for(spec, environ=os.environ)
    for note in notes:
        typer.echo(f"hydroslurm: {note}", err=True)
    run = RunDir(folder.absolute() / "RUN_FOLDER")
    typer.echo(job_script(spec.job, plan, run), nl=False)
    if spec.job.elastic is not None:
        typer.echo("\n# --- of each member, which the coordinator submits:")
        typer.echo(member_script(spec.job, plan, run, {}), nl=False)


def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print a reference page instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a job spec, for editors and other tools."""
    from hydroslurm.jobs.spec.schema import reference, schema_text

    typer.echo(reference() if markdown else schema_text(), nl=False)
