"""``hydroslurm spank build | install | uninstall``: the --preempt option of srun, for admins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

spank_app = typer.Typer(
    no_args_is_help=True, help="Build, install or uninstall srun's option --preempt."
)

Include = Annotated[
    Path | None, typer.Option(help="Folder with slurm/spank.h. Default: the compiler's.")
]
Plugstack = Annotated[
    Path | None, typer.Option(help="plugstack.conf. Default: the one that Slurm reads.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would change, without changing it.")
]


@spank_app.command("build")
def build(
    out: Annotated[Path, typer.Option(help="File or folder to write.")] = Path(),
    include: Include = None,
) -> None:
    """Compile the plugin against this machine's Slurm and print its path. Changes nothing else.

    Needs a C compiler and Slurm's headers (libslurm-dev on Debian and Ubuntu, slurm-devel on RPM
    systems). A plugin only works with the Slurm release that it was built for.
    """
    import os

    from hydroslurm.slurm.spank.build import build_plugin

    typer.echo(str(build_plugin(out, environ=os.environ, include=include).absolute()))


@spank_app.command("install")
def install(
    plugstack: Plugstack = None,
    lib: Annotated[
        Path | None, typer.Option(help="Folder for the plugin. Default: beside plugstack.conf.")
    ] = None,
    include: Include = None,
    dry_run: DryRun = False,
) -> None:
    """Build the plugin, add it to plugstack.conf as optional, and show what changes.

    All other lines stay. Run it again after an upgrade of Slurm, which needs a new plugin;
    uninstall reverts it.

    Nothing has to be restarted: srun, sbatch and salloc read plugstack.conf at each start,
    slurmstepd for each job step. The file and the plugin must have the same paths on all submit and
    compute nodes. Where the plugin is missing, jobs run without --preempt.
    """
    import os

    from hydroslurm.slurm.spank.build import PLUGIN, build_plugin
    from hydroslurm.slurm.spank.plugstack import added, apply, plugstack_of

    path = plugstack or plugstack_of(os.environ)
    target = (lib or path.parent).absolute() / PLUGIN
    change = added(path, target)
    if dry_run:
        typer.echo(f"would build {target}\n{change.message}")
        return
    build_plugin(target, environ=os.environ, include=include)
    apply(change)
    typer.echo(f"built {target}\n{change.message}")
    typer.echo(
        "every node needs both files under the same paths (configless clusters distribute "
        "plugstack.conf, but not the plugin). Try it: srun --help | grep -A1 preempt"
    )


@spank_app.command("uninstall")
def uninstall(plugstack: Plugstack = None, dry_run: DryRun = False) -> None:
    """Remove the line from plugstack.conf. The plugin's file stays, for running jobs."""
    import os

    from hydroslurm.slurm.spank.plugstack import apply, plugstack_of, removed

    change = removed(plugstack or plugstack_of(os.environ))
    if not dry_run:
        apply(change)
    typer.echo(change.message)
