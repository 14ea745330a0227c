"""The default run folders of a job: ``hydroslurm-runs/JOBID``, ``JOBID.2``, ``JOBID.3`` ...

A run belongs to a training, and a job may have several: job steps one after the other or side by
side, several programs in one step, one line in a loop. ``job.json`` says which command line a
folder was made for, and ``start-RESTART.json``, which only one process can make, which job step has
taken it in a start of the job. So a restart finds its folder again by its command line, whatever
the order in which the steps come. Of one line that runs several times each has the next folder,
unless the one before it is over and has not finished: then it is a retry.

Job ids start again on every cluster, and on one that was reinstalled. So ``job.json`` names the
job, too, and a job that finds another job's folder is refused. The environment decides in nearly
all cases: by the name of the cluster, the restart count, the address of the srun, and the job's
start, where Slurm sets it (23.02). Without the latter a later job step of a first attempt looks
like another job of the same number; its first rank asks slurmctld, once, when the job has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core import rundir
from hydroslurm.core.command import Command
from hydroslurm.core.decoding import decode
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.fence import Claim
from hydroslurm.core.files import clean, read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.status import RankStatus, read_status
from hydroslurm.core.trust import is_trusted
from hydroslurm.errors import RunFolderError, SlurmError, UsageError
from hydroslurm.slurm.allocation import is_alone, step_of
from hydroslurm.slurm.programs import Programs

if TYPE_CHECKING:
    from hydroslurm.slurm.values import Job

CLOCKS_APART_S = 5.0
"""How far a node's clock may be behind the controller's. Another job's folder is older than this:
that job's end and the start of a cluster lie in between."""

_ANSWER_S = 20.0
"""Slurm's programs give up on an absent controller after 9 to 18 s."""
_APPEAR_S = 1.0
"""Delay after which a network file system shows what another rank has written."""
_LOOK_AGAIN_S = 0.1
_LOOK_AT_SAVES_S = 0.05
_SILENT_S = 15.0
"""A rank whose status is older than this, and than three heartbeats, has been killed."""
_LIMIT_BYTES = 1 << 16
_STEP_ADDRESS = ("SLURM_STEP_ID", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_PORT")
_BATCH_ADDRESS = ("SLURMD_NODENAME", "SLURM_TASK_PID")

_lock = threading.Lock()
_doubts: dict[RunDir, str] = {}
_chosen: dict[tuple[object, ...], RunDir | RunFolderError] = {}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The process that made a folder, or has taken it in a start of its job.

    Attributes:
        step: the address of the srun that started it; "" where the environment has none.
        step_id: the number of srun's job step; "" in a batch script.
        task: of a task that trains by itself, its number; -1 for ranks that train together.
        exact, stable: its :class:`Command`; "" where a version before this one wrote it.
        made_epoch_s: when, by its clock.
    """

    cluster: str
    job_id: int
    job_name: str
    step: str
    made_epoch_s: float
    step_id: str = ""
    task: int = -1
    exact: str = ""
    stable: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], job_id: int) -> Owner:
        step = step_of(environ)
        address = _BATCH_ADDRESS if step is None else _STEP_ADDRESS
        parts = [environ.get(name, "") for name in address]
        command = Command.of_this_process()
        return cls(
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            job_id=job_id,
            job_name=environ.get("SLURM_JOB_NAME", ""),
            step=" ".join(parts) if all(parts) else "",
            made_epoch_s=time.time(),
            step_id="" if step is None else str(step),
            task=-1
            if step is None or not is_alone(environ)
            else int(environ.get("SLURM_PROCID", 0)),
            exact=command.exact,
            stable=command.stable,
        )

    def is_before(self, start_epoch_s: int | None) -> bool:
        """Whether the folder was made before a job started; None: it has not started."""
        return start_epoch_s is None or self.made_epoch_s < start_epoch_s - CLOCKS_APART_S

    def trains(self, other: Owner, *, exactly: bool = False) -> bool:
        """Whether both have the command line of one training."""
        if not (self.exact and other.exact):
            return True
        same = self.exact == other.exact if exactly else self.stable == other.stable
        return same and self.task == other.task


def from_environment(environ: Mapping[str, str]) -> RunDir | None:
    """The run folder of this rank, or None when the process belongs to no run: as
    :func:`rundir.from_environment`; of the default ones, that of this training is made, and
    checked to be this job's.

    Raises:
        RunFolderError: it belongs to another job of this number.
    """
    default = rundir.from_environment(environ)
    if default is None or rundir.named_in(environ):
        return default
    base = RunDir(default.root.absolute())
    me = Owner.from_environ(environ, int(base.root.name))
    key = (base, me.cluster, me.step, me.task)
    with _lock:
        if key not in _chosen:
            try:
                refusal = _refusal(base, me, environ)
                _chosen[key] = refusal or _choose(base, me, environ)
            except RunFolderError as error:
                _chosen[key] = error
        if isinstance(found := _chosen[key], RunFolderError):
            raise found
        return found


_TWINS = (
    "a line of this job runs several times at once. A restart cannot tell which run folder is "
    "whose: give each its own by Run(directory=...), or another argument"
)
_NEW_LINE = (
    "no start of this job before this one had this command line, so a new run begins, and {} is "
    "left as it is. If an argument differs from start to start, name the folder: Run(directory=...)"
)


def warn_of_doubt(run: RunDir) -> None:
    """Say of a new folder what speaks against it: another one of the same command line that runs
    beside it, or one that an earlier start of the job has left unfinished."""
    if run in _doubts:
        _warn(_doubts[run])


def run_dirs_of(job: Job) -> tuple[RunDir, ...]:
    """The run folders of all trainings of a job, in the order in which they first began; one where
    its comment names it."""
    first = of_job(job)
    if not rundir.is_named(job.comment or ""):
        return tuple(_numbered(first))
    if job.array_task_id is None:
        return (first,)
    return (RunDir(Path(str(first.root).replace("%a", str(job.array_task_id)))),)


def others_of_job(environ: Mapping[str, str]) -> tuple[RunDir, ...]:
    """The default folders of the other trainings of this process's job."""
    default = rundir.from_environment(environ)
    if default is None or rundir.named_in(environ):
        return ()
    mine = from_environment(environ)
    return tuple(one for one in _numbered(RunDir(default.root.absolute())) if one != mine)


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
    return _read(run.job_json)


def _read(path: Path) -> Owner | None:
    try:
        return decode(Owner, read_regular(path, limit_bytes=_LIMIT_BYTES))
    except (OSError, ValueError):
        return None


_NOBODY = Owner(cluster="", job_id=0, job_name="", step="", made_epoch_s=0.0)


def _numbered(first: RunDir) -> Iterator[RunDir]:
    """The existing ones in order; the first even if it does not exist."""
    yield first
    number = 2
    while os.path.lexists((run := first.numbered(number)).job_json):
        yield run
        number += 1


def lives(holder: Claim, me: Claim) -> bool:
    """Whether the training that has claimed a folder in this start of the job still runs, and is
    not the one that torchrun or our agent has just started again."""
    environ = os.environ
    if environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" or environ.get(rundir.GENERATION_ENV):
        return False
    if holder.host == me.host:
        return holder.lives_here()
    return (
        bool(holder.step_id)
        and holder.step_id != me.step_id
        and _step_lives(me.job_id, holder.step_id, environ)
    )


# --- which training a folder is of
# ------------------------------------------------------------------------------------------------


def _choose(base: RunDir, me: Owner, environ: Mapping[str, str]) -> RunDir:
    """The folder of this training, which no other one has in this start of the job."""
    ask_from_s = time.monotonic()
    if (environ.get("RANK") or environ.get("SLURM_PROCID") or "0") != "0" and me.task < 0:
        ask_from_s += _ANSWER_S  # the first rank asks for all
    while True:
        may_ask = time.monotonic() >= ask_from_s
        found = _find(base, me, environ, may_ask=may_ask)
        if found is None:
            time.sleep(_LOOK_AGAIN_S)
            continue
        run, record = found
        try:
            if record is None or _write_once(record, me):
                return run
        except OSError:  # who writes there first has the better message
            return run


def _find(
    base: RunDir, me: Owner, environ: Mapping[str, str], *, may_ask: bool
) -> tuple[RunDir, Path | None] | None:
    """The folder to take, and the record to write for it; no record where a process of this
    training has done that. None: look again."""
    restart_count = int(environ.get("SLURM_RESTART_COUNT") or 0)
    runs = list(_numbered(base))
    usable = [run for run in runs if run == base or is_trusted(run.root, shared=True)]
    taken = [(run, _holders(run, restart_count)) for run in usable]
    for run, holders in taken:
        is_mine = holders and holders[-1].step_id == me.step_id and holders[-1].trains(me)
        is_over = is_mine and run.finished_json.exists() and _repeats(holders[-1], me, environ)
        if is_mine and not is_over:
            return run, None
    free: dict[bool, tuple[RunDir, Path]] = {}
    doubt = ""
    for run, holders in taken:
        if holders:
            if run.finished_json.exists() or not holders[-1].trains(me, exactly=True):
                continue
            if not may_ask:
                return None
            if _lives(holders[-1], me, environ):
                doubt = _TWINS
                continue
        owner = _read_soon(run.job_json)
        exactly = owner is None or owner.trains(me, exactly=True)
        if exactly or (owner is not None and owner.trains(me)):
            free.setdefault(exactly, (run, run.start_json(restart_count, len(holders) + 1)))
        elif restart_count and not holders and not run.finished_json.exists():
            doubt = doubt or _NEW_LINE.format(run.root)
    if free:
        return free[max(free)]
    new = base.numbered(len(runs) + 1)
    if doubt:
        _doubts[new] = doubt
    return (new, new.start_json(restart_count, 1)) if _take(new, me) is None else None


def _holders(run: RunDir, restart_count: int) -> list[Owner]:
    """Who has taken it in this start of the job, one after the other."""
    found: list[Owner] = []
    while os.path.lexists(path := run.start_json(restart_count, len(found) + 1)):
        found.append(_read_soon(path) or _NOBODY)
    return found


def _repeats(holder: Owner, me: Owner, environ: Mapping[str, str]) -> bool:
    """Whether this is the next run of a line that has finished in this very job step, instead of a
    rank that comes late, or a restart of the whole job."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS") or "1"
    together = tasks if me.step_id and me.task < 0 else "1"
    if environ.get("TORCHELASTIC_RUN_ID"):  # ends before the next begins, on a single node
        together = "1" if environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE") else tasks
    if together != "1" or environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return False
    try:
        return not _is_of_earlier_start(holder, me, environ)
    except (SlurmError, UsageError):
        return False


def _lives(holder: Owner, me: Owner, environ: Mapping[str, str]) -> bool:
    """Whether the job step of a holder still runs, so that this is no retry of it."""
    if not holder.step_id:
        return True
    try:
        if _is_of_earlier_start(holder, me, environ):
            return False
    except (SlurmError, UsageError):
        return True
    return _step_lives(me.job_id, holder.step_id, environ)


def _is_of_earlier_start(holder: Owner, me: Owner, environ: Mapping[str, str]) -> bool:
    """srun --export=NONE drops the variable with the restart count."""
    if environ.get("SLURM_RESTART_COUNT", "0") != "0":
        return False
    started = environ.get("SLURM_JOB_START_TIME", "")
    if started.isascii() and started.isdecimal():
        return holder.is_before(int(started))
    return holder.is_before(_ask(me.job_id, environ).start_epoch_s)


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
        _warn(
            f"{run.root} exists and is used, but whether this job made it is not known: {reason}. "
            f"{rundir.RUN_DIR_ENV} names another run folder"
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
        if _write_once(run.job_json, me):
            return None
    except (OSError, RunFolderError):
        return None
    return _read_soon(run.job_json)


def _write_once(path: Path, me: Owner) -> bool:
    """Write a record that only one process can make, whole from the first moment; False: another
    has."""
    try:
        write_atomically(path, json.dumps({"v": 1, **asdict(me)}), exclusive=True)
    except FileExistsError:
        return False
    return True


def _read_soon(path: Path) -> Owner | None:
    """What another process has written; None where it says nothing."""
    until_s = time.monotonic() + _APPEAR_S
    while is_trusted(path, shared=True):
        is_late = time.monotonic() >= until_s
        if (owner := _read(path)) is not None or is_late:
            return owner
        time.sleep(0.01)
    return None


def _warn(text: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # an error by -W is not worth a training
        warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=4)


def _ask(job_id: int, environ: Mapping[str, str]) -> Job:
    from hydroslurm.slurm.client import open_client
    from hydroslurm.slurm.programs import RetryPolicy

    retry_policy = RetryPolicy(call_timeout_s=_ANSWER_S, give_up_after_s=0.0)
    return open_client(environ=environ, retry_policy=retry_policy).job(job_id)


def _step_lives(job_id: int, step_id: str, environ: Mapping[str, str]) -> bool:
    """Whether a job step still runs, also where Slurm cannot be asked."""
    try:
        step = f"{_ask(job_id, environ).id.argument}.{step_id}"
        arguments = ("--noheader", f"--steps={step}", "--format=%i")
        return bool(Programs(environ).run("squeue", *arguments, timeout_s=_ANSWER_S).strip())
    except (SlurmError, UsageError):
        return True


def _of_another_job(run: RunDir, owner: Owner) -> RunFolderError:
    name = f" ({clean(owner.job_name)})" if owner.job_name else ""
    made = datetime.fromtimestamp(owner.made_epoch_s, tz=timezone.utc)
    return RunFolderError(
        f"{run.root} is the run folder of another job {owner.job_id}{name}, made at "
        f"{made:%Y-%m-%d %H:%M:%S} UTC on cluster {clean(owner.cluster) or '(unknown)'}. "
        f"{rundir.RUN_DIR_ENV} or Run(directory=...) names another one"
    )


# --- the other trainings of a job
# ------------------------------------------------------------------------------------------------


def wait_until_saved(folders: Iterable[RunDir], *, restart_count: int, until_mono_s: float) -> None:
    """Wait until none of these trainings is on its way to a save, or the time is over.

    They are the others of this job: ``scontrol requeue`` kills all job steps at once, and the one
    that is saved first must not take the others' time to save away.
    """
    watched = list(folders)
    while time.monotonic() < until_mono_s:
        watched = [one for one in watched if _is_at_work(one, restart_count)]
        if not watched:
            return
        time.sleep(_LOOK_AT_SAVES_S)


def _is_at_work(run: RunDir, restart_count: int) -> bool:
    """Whether a rank of it lives, and none has asked for the requeue, which follows the commit of
    all."""
    try:
        ranks = run.rank_status_names()
    except OSError:
        return False
    alive = any(_is_training(read_status(path), restart_count) for path in ranks.values())
    return alive and not any(_has_asked(run.rank_events(rank), restart_count) for rank in ranks)


def _is_training(status: RankStatus | None, restart_count: int) -> bool:
    if status is None or status.restart_count != restart_count:
        return False
    if status.state == "ended" or status.finished or not status.saver:
        return False
    silent_s = time.time() - status.as_of.epoch_ns / 1e9
    return silent_s < max(_SILENT_S, 3 * (status.heartbeat_s or 0.0))


def _has_asked(events: Path, restart_count: int) -> bool:
    with contextlib.suppress(OSError):
        asked = read_events(events, kinds=(EventKind.REQUEUE_ASKED,))
        return any(event.restart_count == restart_count for event in asked)
    return False
