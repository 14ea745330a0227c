"""Options of several verbs, and how they print lines and tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Annotated

import typer

Which = Annotated[
    str, typer.Argument(metavar="JOB", help="A job id (12, or 12_3 of an array), or a run folder.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]
AsJsonLines = Annotated[
    bool, typer.Option("--json", help="Print one JSON object per job, one per line.")
]
AllUsers = Annotated[bool, typer.Option("--all-users", "-a", help="Jobs of all users.")]
OnlyPartition = Annotated[str | None, typer.Option("--partition", "-p", help="Only jobs in it.")]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="The script's own.")
]


def echo(line: str, *, err: bool = False) -> None:
    """Print a line that may contain others' text, at most 2000 characters."""
    from hydroslurm.core.files import clean

    typer.echo(clean(line, most=2000), err=err)


def echo_table(rows: Iterable[Sequence[object]], *, right: Collection[int] = ()) -> None:
    """Print rows with aligned columns; None is a dash. ``right``: columns of numbers."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        aligned = (
            text.rjust(width) if n in right else text.ljust(width)
            for n, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        echo("  ".join(aligned).rstrip())
