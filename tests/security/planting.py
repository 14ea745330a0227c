"""Folders that people share, and what a stranger puts there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TRAIN = """
    import os, sys, warnings
    import torch, hydroslurm
    os.umask(int(sys.argv[2], 8))
    model = torch.nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
    run = hydroslurm.Run(model=model, directory=sys.argv[1] or None, every_s=0)
    run.resume()
    print("at step", run.step, "with", float(model.weight.detach()))
    run.step += 3
    with torch.no_grad():
        model.weight += 1.0
    run.safe_point()
    run.save()
    run.close()
"""
"""One attempt: three steps on from where the run is, the weight greater by one, and a save."""


def python(
    code: str, *arguments: object, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as us; what it prints is one text."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(
        command,
        env={**os.environ, "HYDROSLURM_GATE": "hooks", **environ},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def train(
    directory: Path | None = None, *, umask: str = "0022", **environ: str
) -> subprocess.CompletedProcess[str]:
    """One attempt of a run, in a folder or (``None``) in that of its job."""
    return python(TRAIN, directory or "", umask, **environ)


def job(submitted_from: Path, *, number: int = 1234) -> dict[str, str]:
    """What Slurm tells the one task of a job."""
    return {
        "SLURM_JOB_ID": str(number),
        "SLURM_SUBMIT_DIR": str(submitted_from),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
    }
