"""Folders that people share, and what a stranger puts there."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from zygote import forked

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
    code: str, *arguments: object, limit_s: float = 300.0, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a program as us, with torch loaded; what it prints is one text."""
    environ = {"HYDROSLURM_GATE": "hooks", **environ}
    words = tuple(map(str, arguments))
    with (
        tempfile.TemporaryDirectory(prefix="hs-program-") as folder,
        forked(code, Path(folder), *words, environ=environ) as child,
    ):
        status = child.end(limit_s=limit_s)
        return subprocess.CompletedProcess(words, status, stdout=f"{child}\n")


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
