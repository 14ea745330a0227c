"""``hydroslurm report RUN_FOLDER``: what the pauses and the stops of a run cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Folder = Annotated[Path, typer.Argument(metavar="RUN_FOLDER", help="A run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the figures as JSON and no table.")]
NoPicture = Annotated[bool, typer.Option("--no-picture", help="Draw no timeline.")]


def report(folder: Folder, as_json: AsJson = False, no_picture: NoPicture = False) -> None:
    """Show every pause and every stop of a run with its latencies, and the steps that were lost.

    Writes report/figures.json and report/timeline.png into the run folder.
    """
    from rich.console import Console

    from hydroslurm.report.figures import figures_of, write_figures
    from hydroslurm.report.history import read_history
    from hydroslurm.report.table import report_view
    from hydroslurm.rundir import RunDir

    history = read_history(folder)
    figures = figures_of(history)
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        Console().print(report_view(history))
    # after the printing, so that a folder that is somebody else's can still be looked at
    paths = [write_figures(figures, RunDir(folder).figures_json)]
    if not no_picture:
        from hydroslurm.report.timeline import write_timeline

        paths.append(write_timeline(history, RunDir(folder).timeline_png))
    for path in paths:
        typer.echo(f"written: {path}", err=as_json)
