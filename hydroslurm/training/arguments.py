"""What a Run is given, checked and made into what it works with."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

from hydroslurm.core import rundir
from hydroslurm.core.fence import Fence
from hydroslurm.core.rundir import SAVE_EVERY_ENV, RunDir
from hydroslurm.errors import UsageError
from hydroslurm.runtime import autoload
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.cadence import Cadence


def cadence_of(
    every_steps: int | None, every_s: float | None, environ: Mapping[str, str]
) -> Cadence:
    """From the arguments, None for what was not said, and HYDROSLURM_SAVE_EVERY_S.

    Raises:
        UsageError: a negative one; a variable that is no number.
    """
    if text := environ.get(SAVE_EVERY_ENV):
        try:
            every_s = float(text)
        except ValueError:
            raise UsageError(f"{SAVE_EVERY_ENV}={text!r}: wanted seconds, such as 600") from None
    for name, value in (("every_steps", every_steps), ("every_s", every_s)):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name}={value}: wanted 0 (never) or a finite number above it")
    if every_steps is None and every_s is None:
        return Cadence()
    return Cadence(every_steps or 0, every_s or 0.0)


def run_directory(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> RunDir:
    """Where the run keeps its state: the folder that was named, else that of this training in the
    job.

    It is made here, that of the job for its owner only: its name can be guessed.

    Raises:
        UsageError: neither is there; or an empty name, which would be the current folder.
        RunFolderError: others may have put something there that a run would obey.
    """
    if given is not None:
        if not os.fspath(given):
            raise UsageError(
                'directory="": wanted a folder\'s name, such as "runs/my-run" ("." for the current '
                "folder), or None for that of the job. Is a variable empty?"
            )
        return RunDir(Path(given).absolute()).claim(mode=0o775)
    found = run_folders.from_environment(environ)
    if found is None:
        raise UsageError(
            "this process is in no Slurm job, so that there is no run folder to save into; give "
            'one: Run(directory="runs/my-run")'
        )
    return RunDir(found.root.absolute()).claim()


def fence_of(run: RunDir, allocation: Allocation | None) -> Fence:
    """For what this process writes into the run's folder."""
    if allocation is None:
        return Fence(run.claim_json)
    return Fence(
        run.claim_json,
        cluster=allocation.cluster_name,
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        step_id="" if allocation.step_id is None else str(allocation.step_id),
    )


def controller_for(run: RunDir, environ: Mapping[str, str]) -> tuple[Controller, bool]:
    """The controller of this process, and whether it was installed for this run."""
    before = installation.controller() if installation.is_installed() else None
    if before is not None and not installation.gives_way():
        return before, False
    # a pause that comes behind the run, from Slurm or a person, must not end what has ended well
    autoload.keep_alive(autoload.killing(environ))
    of_job = rundir.from_environment(environ) is not None
    made = installation.install(run_dir=None if of_job else run.root, environ=environ)
    return made, made is not before
