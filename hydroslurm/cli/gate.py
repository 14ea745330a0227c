"""``hydroslurm gate build|info|trace``: the native operator gate for the installed torch."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hydroslurm.cli.shared import AsJson, ScriptArguments, echo_table

if TYPE_CHECKING:
    from hydroslurm.gate.protocol import Trace

app = typer.Typer(no_args_is_help=True, help="Build and inspect the operator gate.")

TRACE_CONTEXT = {"allow_interspersed_args": False, "ignore_unknown_options": True}

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Build here instead of in the user's cache, for a site."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Build even if there is one already.")]
Keep = Annotated[int, typer.Option("--keep", min=0, help="How many operators to record.")]
Script = Annotated[Path, typer.Argument(metavar="SCRIPT", exists=True, dir_okay=False)]


@app.command("build")
def build_gate(out: Out = None, force: Force = False) -> None:
    """Build the gate for the installed torch, and test it. Needs a C++ compiler and 30 seconds."""
    from hydroslurm.errors import GateError
    from hydroslurm.gate import build
    from hydroslurm.gate import library as gates

    torch = gates.installed_torch()
    try:
        root = out.absolute() if out else gates.cache_root(os.environ)
        folder = root / gates.key_of(torch)
        if not force and gates.is_usable(folder):
            typer.echo(f"{folder / gates.LIBRARY} exists already (--force rebuilds it)")
        else:
            built = build.build(root, environ=os.environ, torch=torch)
            typer.echo(f"{built.path} built and tested in {built.built_s:.1f} s")
    except OSError as error:
        raise GateError(f"cannot write the gate: {error}; choose a folder with --out") from error
    if out:
        typer.echo(f"jobs find it with  export {gates.SITE_DIR_ENV}={root}")


@app.command("info")
def info(as_json: AsJson = False) -> None:
    """Show which gate a job here would get, without building one; exit status 1 if none works."""
    from hydroslurm.errors import NoCompiler
    from hydroslurm.gate import build
    from hydroslurm.gate import library as gates

    torch = gates.installed_torch()
    library = gates.find(os.environ, torch=torch)
    facts: dict[str, object] = {
        "torch": torch.version,
        "key": gates.key_of(torch),
        "origin": library.origin if library else None,
        "library": str(library.path) if library else None,
        "site_dir": os.environ.get(gates.SITE_DIR_ENV),
    }
    try:
        facts["compiler"] = shlex.join(build.find_compiler(os.environ))
    except NoCompiler:
        facts["compiler"] = None
    usable = bool(library or facts["compiler"])
    if library:
        from hydroslurm.gate.native_gate import NativeGate

        facts["granularity"] = NativeGate(library.path).granularity
    facts["gate"] = "native" if library else "native, built on first use" if usable else "hooks"
    facts["marks"] = "NVTX" if torch.nvtx else "none: pip install nvidia-nvtx and rebuild the gate"
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        echo_table(facts.items())
    if not usable:
        raise typer.Exit(1)


@app.command("trace", context_settings=TRACE_CONTEXT)
def trace(
    script: Script, arguments: ScriptArguments = None, keep: Keep = 50, as_json: AsJson = False
) -> None:
    """Run a script and print the operators at which it could be held: name, phase, thread."""
    from hydroslurm.gate.native_gate import NativeGate

    gate = NativeGate()
    sys.argv = [str(script), *(arguments or [])]
    sys.path.insert(0, str(script.parent.absolute()))
    with gate.trace(keep) as seen:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as left:
            status = left.code
        else:
            status = 0
    _print_trace(seen, as_json=as_json)
    sys.exit(status)


def _print_trace(trace: Trace, *, as_json: bool) -> None:
    if as_json:
        rows = [{**vars(op), "phase": op.phase.name.lower()} for op in trace.operators]
        typer.echo(json.dumps({"count": trace.count, "operators": rows}))
        return
    for operator in trace.operators:
        typer.echo(f"{operator.tid:8d} {operator.phase.name.lower():8s} {operator.name}")
    typer.echo(f"{trace.count} operators, {len(trace.operators)} shown")
