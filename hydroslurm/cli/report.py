"""``hydroslurm report``: the cost of a run's pauses and stops, and the contents of a profile."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.core.garbage import without_gc

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hydroslurm.core.rundir import RunDir
    from hydroslurm.report.nsys import Profile

Schema = Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of figures.json.")]

_PROFILES = (".nsys-rep", ".sqlite")


@without_gc()  # millions of values that all stay: searching for garbage takes a third of the time
def report(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN_FOLDER | REPORT.nsys-rep | REPORT.sqlite ...",
            help="A run folder, nsys reports of its ranks, or both.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON instead of tables.")
    ] = False,
    no_picture: Annotated[bool, typer.Option("--no-picture", help="Do not draw pictures.")] = False,
    no_slurm: Annotated[
        bool, typer.Option("--no-slurm", help="Do not ask Slurm's accounting.")
    ] = False,
    schema: Schema = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --schema: print a reference page instead.")
    ] = False,
) -> None:
    """Show every pause and stop of a run, and where its time went.

    Writes figures.json, timeline.png, histograms.png, report.html (one page with everything) and
    trace.json (for ui.perfetto.dev) into report/ in the run folder. Includes nsys profiles in its
    profile/ folder and Slurm's accounting. Works while the run is going on. For an nsys report
    alone, shows the marks in it.
    """
    from hydroslurm.errors import UsageError

    if schema or markdown:
        from hydroslurm.report.figures import reference, schema_text

        typer.echo(reference() if markdown else schema_text(), nl=False)
        return
    profiles = [path for path in paths or () if path.suffix in _PROFILES]
    folders = [path for path in paths or () if path.suffix not in _PROFILES]
    if len(folders) > 1 or not (folders or profiles):
        raise UsageError(
            f"wanted one run folder, nsys reports, or both; got {len(folders)} folders. Write one "
            "report after the other"
        )
    if folders:
        _report_run(folders[0], profiles, as_json, no_picture, no_slurm)
    else:
        _report_profiles(profiles, as_json)


def _report_profiles(paths: Sequence[Path], as_json: bool) -> None:
    from hydroslurm.report.nsys import profile_figures, read_profile
    from hydroslurm.report.views import profile_view

    for path in paths:
        profile = read_profile(path)
        figures = json.dumps(profile_figures(profile))
        _print(figures if as_json else _rendered(profile_view(profile)))


def _report_run(
    folder: Path, given: Sequence[Path], as_json: bool, no_picture: bool, no_slurm: bool
) -> None:
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.report.reading import read_history
    from hydroslurm.report.writing import start_pictures, write_all

    run = RunDir(folder)
    if not no_picture:
        _draw_sizes(run, as_json=as_json)
    history = read_history(folder)
    # drawing takes longest: start it before importing anything else
    pictures = None if no_picture else start_pictures(history, run)
    from hydroslurm.report.external_sources import Accounting, ask_slurm
    from hydroslurm.report.figures import Report
    from hydroslurm.report.nsys import profiles_in
    from hydroslurm.report.views import report_view
    from hydroslurm.slurm.client import RetryPolicy, open_client

    profiles, missing = _read_profiles([*profiles_in(run.profile), *given])
    patience = RetryPolicy(call_timeout_s=5.0, give_up_after_s=0.0)
    connect = functools.partial(open_client, retry_policy=patience)
    if no_slurm and history.job_ids:
        accounting = Accounting(missing=("Slurm was not asked (--no-slurm).",))
    else:
        accounting = ask_slurm(connect, history.attempts)
    result = Report(history, accounting, profiles, unread=missing)
    _print(json.dumps(result.figures.as_dict()) if as_json else _rendered(report_view(result)))
    # after printing: another user's folder can be reported on, but not written
    for path in write_all(result, run, pictures=pictures):
        _print(f"written: {path}", err=as_json)


def _draw_sizes(run: RunDir, *, as_json: bool) -> None:
    """Draw an elastic run's changes of size."""
    from hydroslurm.elastic.folder import ElasticFolder
    from hydroslurm.errors import RunFolderError
    from hydroslurm.report.writing import write_sizes

    elastic = ElasticFolder(run=run.root)
    if not elastic.ledger_jsonl.is_file():
        return
    path = run.timeline_png.with_name("sizes.png")
    title = f"{run.root.name}: members over time, and what each change cost"
    with contextlib.suppress(RunFolderError):  # another user's folder cannot be written
        if write_sizes(elastic.ledger(), path, title=title) is not None:
            _print(f"written: {path}", err=as_json)


def _rendered(view: RenderableType) -> str:
    """Render as text: rich's own print ends the program on a broken pipe."""
    from rich.console import Console

    console = Console(markup=False, emoji=False)  # names may contain brackets and colons
    with console.capture() as captured:
        console.print(view)
    return captured.get().removesuffix("\n")


def _print(text: str, *, err: bool = False) -> None:
    """Print; if a pipe's reader has left (``| head``), drop the rest: the files remain to be
    written."""
    try:
        typer.echo(text, err=err)
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno() if err else sys.stdout.fileno())
        os.close(nowhere)


def _read_profiles(paths: Sequence[Path]) -> tuple[tuple[Profile, ...], tuple[str, ...]]:
    """Return the readable profiles, and why the others are not; the report goes on without them."""
    from hydroslurm.errors import HydroslurmError
    from hydroslurm.report.nsys import read_profile

    profiles: list[Profile] = []
    missing: list[str] = []
    for path in dict.fromkeys(path.resolve() for path in paths):
        try:
            profiles.append(read_profile(path))
        except HydroslurmError as error:
            missing.append(str(error))
    return tuple(profiles), tuple(missing)
