"""The default run folder of a job, ``hydroslurm-runs/JOBID``, and whether it is this job's.

Job ids start again on every cluster, and on one that was reinstalled. So the process that makes a
default folder writes ``job.json`` into it, and a job that finds another job's folder is refused.

The environment decides in nearly all cases: by the name of the cluster, the restart count, the
address of the srun, and the job's start, where Slurm sets it (23.02). Without the latter a later
job step of a first attempt looks like another job of the same number; its first rank asks
slurmctld, once, when the job has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core import rundir
from hydroslurm.core.files import clean, parse_json, read_regular
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import is_trusted
from hydroslurm.errors import RunFolderError, SlurmError, UsageError

if TYPE_CHECKING:
    from hydroslurm.slurm.values import Job

CLOCKS_APART_S = 5.0
"""How far a node's clock may be behind the controller's. Another job's folder is older than this:
that job's end and the start of a cluster lie in between."""

_ANSWER_S = 20.0
"""Slurm's programs give up on an absent controller after 9 to 18 s."""
_APPEAR_S = 1.0
"""How late a network file system may show what another rank has written."""
_LIMIT_BYTES = 1 << 16
_STEP_ADDRESS = ("SLURM_STEP_ID", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_PORT")
_BATCH_ADDRESS = ("SLURMD_NODENAME", "SLURM_TASK_PID")

_lock = threading.Lock()
_refusals: dict[tuple[object, ...], RunFolderError | None] = {}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The job that made a folder.

    Attributes:
        step: the address of the srun that started its maker; "" where the environment has none.
        made_epoch_s: when, by the maker's clock.
    """

    cluster: str
    job_id: int
    job_name: str
    step: str
    made_epoch_s: float

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], job_id: int) -> Owner:
        address = _STEP_ADDRESS if environ.get("SLURM_STEP_ID") else _BATCH_ADDRESS
        parts = [environ.get(name, "") for name in address]
        return cls(
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            job_id=job_id,
            job_name=environ.get("SLURM_JOB_NAME", ""),
            step=" ".join(parts) if all(parts) else "",
            made_epoch_s=time.time(),
        )

    def is_before(self, start_epoch_s: int | None) -> bool:
        """Whether the folder was made before a job started; None: it has not started."""
        return start_epoch_s is None or self.made_epoch_s < start_epoch_s - CLOCKS_APART_S


def from_environment(environ: Mapping[str, str]) -> RunDir | None:
    """The run folder of this rank, or None when the process belongs to no run: as
    :func:`rundir.from_environment`; the default one is made, and checked to be this job's.

    Raises:
        RunFolderError: it belongs to another job of this number.
    """
    default = rundir.from_environment(environ)
    if default is None or rundir.named_in(environ):
        return default
    run = RunDir(default.root.absolute())
    me = Owner.from_environ(environ, int(run.root.name))
    key = (run, me.cluster, me.step)
    with _lock:
        if key not in _refusals:
            _refusals[key] = _refusal(run, me, environ)
        if (refusal := _refusals[key]) is not None:
            raise refusal
        return run


def of_job(job: Job) -> RunDir:
    """The run folder of a job that Slurm describes; makes nothing. A path where nothing is if the
    default folder belongs to an earlier job of this number."""
    comment = job.comment or ""
    run = rundir.of_job(job.job_id, work_dir=Path(job.work_dir or "."), comment=comment)
    if rundir.is_named(comment) or job.restart_count:
        return run
    owner = read_owner(run)
    if owner is None or not owner.is_before(job.start_epoch_s):
        return run
    return RunDir(run.root.with_name(f"{run.root.name}-since-{job.start_epoch_s or 'never'}"))


def read_owner(run: RunDir) -> Owner | None:
    """The job that made a folder, for display; None where nothing says so."""
    try:
        row = parse_json(read_regular(run.job_json, limit_bytes=_LIMIT_BYTES))
        return Owner(
            cluster=str(row["cluster"]),
            job_id=int(row["job_id"]),
            job_name=str(row["job_name"]),
            step=str(row["step"]),
            made_epoch_s=float(row["made_epoch_s"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _refusal(run: RunDir, me: Owner, environ: Mapping[str, str]) -> RunFolderError | None:
    """Why this job may not use its default folder; makes it if there is none."""
    owner = _take(run, me)
    if owner is None:
        return None
    if len({owner.cluster, me.cluster} - {""}) == 2:
        return _of_another_job(run, owner)
    if environ.get("SLURM_RESTART_COUNT", "0") != "0" or (me.step and me.step == owner.step):
        return None
    started = environ.get("SLURM_JOB_START_TIME", "")
    if started.isascii() and started.isdecimal():
        return _of_another_job(run, owner) if owner.is_before(int(started)) else None
    if (environ.get("RANK") or environ.get("SLURM_PROCID") or "0") != "0":
        return None  # the first rank asks for all
    try:
        job = _ask(me.job_id, environ)
    except (SlurmError, UsageError) as error:
        # refusing would end every second job step where no Slurm program is (containers)
        reason = " ".join(str(error).split())
        with contextlib.suppress(RuntimeWarning):  # an error by -W is not worth a training
            warnings.warn(
                f"hydroslurm: {run.root} exists and is used, but whether this job made it is not "
                f"known: {reason}. {rundir.RUN_DIR_ENV} names another run folder",
                RuntimeWarning,
                stacklevel=4,
            )
        return None
    # srun --export=NONE drops the variable with the restart count
    is_another = not job.restart_count and owner.is_before(job.start_epoch_s)
    return _of_another_job(run, owner) if is_another else None


def _take(run: RunDir, me: Owner) -> Owner | None:
    """Take a folder for this job, or return the job that has it. None: it is this job's now, or
    cannot be anybody's, which the first to write into it reports."""
    try:
        run.claim()
        fd = os.open(run.job_json, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        until_s = time.monotonic() + _APPEAR_S
        while is_trusted(run.job_json, shared=True) and time.monotonic() < until_s:
            if (owner := read_owner(run)) is not None:
                return owner
            time.sleep(0.01)
        return None
    except (OSError, RunFolderError):
        return None
    with contextlib.suppress(OSError), os.fdopen(fd, "w") as file:
        file.write(json.dumps({"v": 1, **asdict(me)}))
    return None


def _ask(job_id: int, environ: Mapping[str, str]) -> Job:
    from hydroslurm.slurm.client import open_client
    from hydroslurm.slurm.refusals import RetryPolicy

    retry_policy = RetryPolicy(call_timeout_s=_ANSWER_S, give_up_after_s=0.0)
    return open_client(environ=environ, retry_policy=retry_policy).job(job_id)


def _of_another_job(run: RunDir, owner: Owner) -> RunFolderError:
    name = f" ({clean(owner.job_name)})" if owner.job_name else ""
    made = datetime.fromtimestamp(owner.made_epoch_s, tz=timezone.utc)
    return RunFolderError(
        f"{run.root} is the run folder of another job {owner.job_id}{name}, made at "
        f"{made:%Y-%m-%d %H:%M:%S} UTC on cluster {clean(owner.cluster) or '(unknown)'}. "
        f"{rundir.RUN_DIR_ENV}, --run-dir or Run(directory=...) name another one"
    )
