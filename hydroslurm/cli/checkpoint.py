"""``hydroslurm checkpoint ls|verify|export``: list, check and export a run's checkpoints."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hydroslurm.checkpoint import folders
from hydroslurm.cli.shared import AsJson, echo, echo_table
from hydroslurm.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMissing,
    CheckpointTooNew,
    CheckpointTooOld,
)

if TYPE_CHECKING:
    from hydroslurm.checkpoint.manifest import Problem
    from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
    from hydroslurm.core.rundir import RunDir

checkpoint_app = typer.Typer(
    no_args_is_help=True, help="List, verify and export what a run has saved."
)

Where = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_CHECKPOINT",
        help="A run folder, its checkpoints folder, or one checkpoint.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FILE",
        help="model.pt, model.safetensors, or model.dcp: a folder for torch.distributed.checkpoint",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="NAME", help="Export only this, such as model; may be repeated."
    ),
]


@checkpoint_app.command("ls")
def list_checkpoints(where: Where, as_json: AsJson = False) -> None:
    """List the checkpoints of a run, oldest first. Reads manifests and checks file sizes."""
    store, names = _open(where)
    rows = _rows(store, names, verify=False)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    header = ("step", "epoch", "kind", "age", "size", "save", "state")
    cells = [
        (
            f"{row['step']}{Path(row['path']).suffix}",  # .2: the second save of this step
            row.get("epoch"),
            row.get("kind"),
            _age(row["age_s"]) if "age_s" in row else None,
            _size(row["size_bytes"]) if "size_bytes" in row else None,
            f"{row['save_s']:.2f} s" if "save_s" in row else None,
            row["state"],
        )
        for row in rows
    ]
    echo_table([header, *cells], right=(0, 1, 3, 4, 5))
    if not rows:
        typer.echo("none")


@checkpoint_app.command("verify")
def verify(where: Where, as_json: AsJson = False) -> None:
    """Compare every file with its checksum; exit status 1 if a checkpoint cannot be loaded."""
    store, names = _open(where)
    rows = _rows(store, names, verify=True)
    bad = [row for row in rows if row["state"] != "whole"]
    if as_json:
        typer.echo(json.dumps(rows))
    else:
        for row in rows:
            echo(f"{row['path']}: {row['state']}{_because(row)}")
        noun = "checkpoint" if len(rows) == 1 else "checkpoints"
        loadable = f"{len(bad)} of them cannot be loaded" if bad else "nothing is damaged"
        typer.echo(f"{len(rows)} {noun}, {loadable}")
    if bad or not rows:
        raise typer.Exit(1)


@checkpoint_app.command("export")
def export(where: Where, out: Out, only: Only = None) -> None:
    """Export the newest good checkpoint, or the given one, to a single file for other programs."""
    from hydroslurm.checkpoint.export import export as write_file
    from hydroslurm.checkpoint.store import newest_good

    store, names = _open(where)
    if names is None:
        chosen = newest_good(store)
    else:
        chosen = next((c for c in store.committed() if c.path.name in names), None)
    if chosen is None:
        raise CheckpointMissing(f"{where} has no committed checkpoint to export")
    write_file(chosen, out, only=only)
    typer.echo(f"{out}: step {chosen.step} of {chosen.path}")


def _open(where: Path) -> tuple[CheckpointStore, frozenset[str] | None]:
    """Return the store, and the name of the one requested checkpoint; None for all."""
    from hydroslurm.checkpoint.storage import AnyonesStorage, Storage
    from hydroslurm.checkpoint.store import CheckpointStore
    from hydroslurm.core.rundir import RunDir

    where = where.absolute()
    if not where.is_dir():
        raise CheckpointMissing(f"{where} is not a folder; wanted a run folder or a checkpoint")
    if folders.key_of(where.name) is not None:
        return CheckpointStore(where.parent, storage=AnyonesStorage()), frozenset([where.name])
    run = RunDir(where)
    _require_run(run)
    folder = run.checkpoints if run.checkpoints.is_dir() else where
    # in our own run, another user's checkpoint is shown as untrusted and is never the newest
    storage = Storage() if where.stat().st_uid == os.getuid() else AnyonesStorage()
    return CheckpointStore(folder, storage=storage), None


def _require_run(run: RunDir) -> None:
    """Reject a folder that is not a run: "no checkpoints" would be true, but no help.

    Raises:
        CheckpointMissing: nothing of a run is in the folder.
    """

    parts = (run.events, run.claim_json, run.submission_json, run.checkpoints)
    if run.root.name == run.checkpoints.name:
        return
    try:
        if any(part.exists() for part in parts):
            return
        names = sorted(path.name for path in run.root.iterdir())
    except OSError as error:
        raise CheckpointMissing(f"{run.root} cannot be read: {error.strerror}") from error
    if any(folders.key_of(name) is not None for name in names):
        return
    held = ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")
    raise CheckpointMissing(
        f"{run.root} is neither a run folder nor a checkpoints folder: it "
        f"{f'holds {held}' if names else 'is empty'}. Give a run folder (with {run.events.name}/ "
        f"or {run.checkpoints.name}/), its {run.checkpoints.name} folder, or one checkpoint "
        "(step-...)"
    )


def _rows(
    store: CheckpointStore, names: frozenset[str] | None, *, verify: bool
) -> list[dict[str, Any]]:
    wanted = (c for c in store.look() if names is None or c.path.name in names)
    return [_row(store, c, verify=verify) for c in wanted]


def _row(store: CheckpointStore, entry: Checkpoint | Problem, *, verify: bool) -> dict[str, Any]:
    from hydroslurm.checkpoint.manifest import Problem

    if isinstance(entry, Problem):
        return {"path": str(entry.path), "step": entry.key[0], **_verdict(entry.error)}
    verdict = {"state": "whole"}
    try:
        if verify:
            store.verify(entry)
        else:
            store.check_sizes(entry)
    except CheckpointError as error:
        verdict = _verdict(error)
    return {
        "path": str(entry.path),
        "step": entry.step,
        "epoch": entry.epoch,
        "kind": entry.kind,
        "age_s": round(time.time() - entry.manifest.created_epoch_ns / 1e9, 3),
        "size_bytes": entry.manifest.size_bytes,
        "save_s": entry.manifest.save_s,
        **verdict,
    }


def _verdict(error: Exception) -> dict[str, str]:

    states = ((CheckpointCorrupt, "torn"), (CheckpointTooNew, "too new"), (CheckpointTooOld, "old"))
    state = next((word for kind, word in states if isinstance(error, kind)), "untrusted")
    return {"state": state, "reason": str(error)}


def _because(row: dict[str, Any]) -> str:
    return f" ({row['reason']})" if "reason" in row else ""


def _age(seconds: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length_s:
            return f"{seconds / length_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def _size(size_bytes: int) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= length:
            return f"{size_bytes / length:.1f} {unit}"
    return f"{size_bytes} B"
