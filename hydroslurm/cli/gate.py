"""``hydroslurm gate build|info``: the native operator gate for the installed torch."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Build and inspect the operator gate.")

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="DIR", help="Build here instead of in the user's cache, for a site."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Build even if there is one already.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON.")]


@app.command("build")
def build_gate(out: Out = None, force: Force = False) -> None:
    """Build the gate for the installed torch, and test it. Needs a C++ compiler and 30 seconds."""
    from hydroslurm.errors import GateError
    from hydroslurm.gate import build, compiler

    torch = compiler.installed_torch()
    try:
        root = out.absolute() if out else build.cache_root(os.environ)
        folder = root / build.key_of(torch)
        if not force and build.is_usable(folder):
            typer.echo(f"{folder / compiler.LIBRARY} exists already (--force rebuilds it)")
        else:
            built = build.build(root, environ=os.environ, torch=torch)
            typer.echo(f"{built.path} built and tested in {built.built_s:.1f} s")
    except OSError as error:
        raise GateError(f"cannot write the gate: {error}; choose a folder with --out") from error
    if out:
        typer.echo(f"jobs find it with  export {compiler.SITE_DIR_ENV}={root}")


@app.command("info")
def info(as_json: AsJson = False) -> None:
    """Show which gate a job here would get, without building one; exit status 1 if none works."""
    from hydroslurm.errors import NoCompiler
    from hydroslurm.gate import build, compiler

    torch = compiler.installed_torch()
    found = build.find(os.environ, torch=torch)
    facts: dict[str, object] = {
        "torch": torch.version,
        "key": build.key_of(torch),
        "origin": found.origin if found else None,
        "library": str(found.path) if found else None,
        "site_dir": os.environ.get(compiler.SITE_DIR_ENV),
    }
    try:
        facts["compiler"] = shlex.join(compiler.find_compiler(os.environ))
    except NoCompiler:
        facts["compiler"] = None
    usable = bool(found or facts["compiler"])
    if found:
        from hydroslurm.gate.native_gate import NativeGate

        facts["granularity"] = NativeGate(found.path).granularity
    facts["gate"] = "native" if found else "native, built on first use" if usable else "hooks"
    facts["marks"] = "NVTX" if torch.nvtx else "none: pip install nvidia-nvtx and rebuild the gate"
    if as_json:
        typer.echo(json.dumps(facts))
    else:
        for name, value in facts.items():
            typer.echo(f"{name:12s} {'-' if value is None else value}")
    if not usable:
        raise typer.Exit(1)
