"""Whether this job is one of submitit's.

submitit says so in variables. A job that is submitted from such a job inherits them, because
sbatch exports the whole environment, although it is none of submitit's and has its own signals.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydroslurm.core.proc import PARENT, stat_of

EXECUTOR_ENV = "SUBMITIT_EXECUTOR"
"""Environment variable that submitit sets in its jobs: ``slurm``, ``local`` ..."""
FOLDER_ENV = "SUBMITIT_FOLDER"
"""Set by submitit in a job's own process, before the function is called."""
_CONTROLLER_ENV = "SUBMITIT_LOCAL_JOB_ID"
_MAIN = "submitit.core._submit"


def executor_of(environ: Mapping[str, str], *, program: Sequence[str] | None = None) -> str:
    """The name of submitit's executor whose job this process belongs to; empty if it belongs to
    none, whatever it has inherited. A job step of such a job belongs to it: it gets its signals.

    Args:
        program: the command line of this process.
    """
    name = environ.get(EXECUTOR_ENV, "")
    if name == "local":
        controller = environ.get(_CONTROLLER_ENV, "")
        return name if not controller.isdecimal() or _is_above(int(controller)) else ""
    folder, job_id = environ.get(FOLDER_ENV), environ.get("SLURM_JOB_ID")
    if name != "slurm" or not folder or not job_id:
        return name
    if _MAIN in (sys.orig_argv if program is None else program):
        return name  # it is about to set the folder, which is that of the job around it
    array = environ.get("SLURM_ARRAY_JOB_ID", ""), environ.get("SLURM_ARRAY_TASK_ID", "")
    ids = [job_id, "_".join(array)] if all(array) else [job_id]
    return name if any(_submitted(folder, one).exists() for one in ids) else ""


def _submitted(folder: str, job_id: str) -> Path:
    """What submitit runs in this job, which it reads before it does anything else."""
    array, _, task = job_id.partition("_")
    path = str(Path(folder).expanduser().absolute() / "%j_submitted.pkl")
    for tag, text in (("%j", job_id), ("%t", "0"), ("%a", task), ("%A", array)):
        path = path.replace(tag, text)
    return Path(path)


def _is_above(pid: int) -> bool:
    """Whether this process, or one that has started it, directly or not, is that one."""
    above = os.getpid()
    while above > 1 and above != pid:
        try:
            above = int(stat_of(above)[PARENT])
        except (OSError, ValueError, IndexError):
            return False
    return above == pid
