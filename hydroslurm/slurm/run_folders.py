"""Which default run folder is this job's: ``hydroslurm-runs/JOBID`` where nobody else's lies there.

Job ids begin anew on every cluster, and on one that was installed again. Who makes a default folder
therefore writes ``job.jsonl`` into it: the job in its first line, and one line for each further job
step that goes on there. A first attempt takes a folder that its own job has made, or else a new
one, JOBID-2, JOBID-3 ...; a restart takes the newest one of its cluster.

In all but one case the environment tells. What one job step's processes have in common is the
address of their srun. Only a later job step of the allocation cannot tell its own folder from that
of another job 1: its first rank asks slurmctld, once, since when the job has run, and the others
follow it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from hydroslurm.core import rundir
from hydroslurm.core.files import clean, open_regular, parse_json, read_regular, write_atomically
from hydroslurm.core.rundir import RunDir
from hydroslurm.core.trust import is_trusted
from hydroslurm.errors import RunFolderError, SlurmError, UsageError

if TYPE_CHECKING:
    from hydroslurm.slurm.values import Job

FOLLOW_S = 10.0
"""So long the other ranks of a job step leave it to its first one to ask Slurm."""
CLOCKS_APART_S = 5.0
"""So much a node's clock may be behind the controller's. Another job's folder is older than this:
that job, and the start of a cluster, come in between."""

_ANSWER_S = 20.0
"""Slurm's programs give up on an absent controller after 9 to 18 s."""
_LIMIT_BYTES = 1 << 20
_STEP_ADDRESS = ("SLURM_STEP_ID", "SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_PORT")
_BATCH_ADDRESS = ("SLURMD_NODENAME", "SLURM_TASK_PID")

_lock = threading.Lock()
_found: dict[tuple[object, ...], RunDir] = {}


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The job that made a folder, as far as its environment tells.

    Attributes:
        steps: the job steps that the folder is known to belong to, each by the address of its srun.
        made_epoch_s: when, by the clock of ``host``.
    """

    cluster: str
    job_id: int
    restart_count: int
    steps: frozenset[str]
    made_epoch_s: float
    job_name: str
    command: str
    host: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], job_id: int) -> Owner:
        address = _STEP_ADDRESS if environ.get("SLURM_STEP_ID") else _BATCH_ADDRESS
        parts = [environ.get(name, "") for name in address]
        count = environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            job_id=job_id,
            restart_count=int(count) if count.isascii() and count.isdecimal() else 0,
            # one that is not whole says nothing
            steps=frozenset([" ".join(parts)] if all(parts) else ()),
            made_epoch_s=time.time(),
            job_name=environ.get("SLURM_JOB_NAME", ""),
            command=clean(" ".join(sys.argv)),
            host=socket.gethostname(),
        )

    def may_be(self, other: Owner) -> bool:
        """Whether nothing speaks against both being one job."""
        clusters = {self.cluster, other.cluster} - {""}
        return self.job_id == other.job_id and len(clusters) < 2

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.made_epoch_s, tz=timezone.utc)
        name = f" ({clean(self.job_name)})" if self.job_name else ""
        return f"another job {self.job_id}{name} has begun at {since:%Y-%m-%d %H:%M:%S} UTC"


def from_environment(environ: Mapping[str, str]) -> RunDir | None:
    """The run folder of this rank, or None when the process belongs to no run: as
    :func:`rundir.from_environment`, with the default one made for this very job.

    All processes of a job step get the same. May ask slurmctld, and wait for the first rank.
    """
    default = rundir.from_environment(environ)
    if default is None or rundir.named_in(environ):
        return default
    me = Owner.from_environ(environ, int(default.root.name))
    key = (default, me.cluster, me.restart_count, me.steps)
    with _lock:
        if key not in _found:
            _found[key] = _find(RunDir(default.root.absolute()), me, environ)
        return _found[key]


def of_job(job: Job) -> RunDir:
    """The run folder of a job that Slurm describes; makes nothing.

    The newest of its number, or of a first attempt the one that it has made since it started: a
    path where nothing is while there is none.
    """
    default = rundir.of_job(
        job.job_id, work_dir=Path(job.work_dir or "."), comment=job.comment or ""
    )
    if rundir.is_named(job.comment or ""):
        return default
    # nearly always there is no second one, and a list of all is long where jobs are many
    has_more = os.path.lexists(_next(default, [default]).root)
    there = _candidates(default) if has_more else [default]
    for run in reversed(there):
        owner = read_owner(run)
        if owner is None or job.restart_count or _is_since(owner.made_epoch_s, job.start_epoch_s):
            return run
    return _next(default, there)


def read_owner(run: RunDir) -> Owner | None:
    """Who made a folder, for showing; None where nobody has said so."""
    try:
        lines = read_regular(run.job_jsonl, limit_bytes=_LIMIT_BYTES).splitlines()
        first, *further = [parse_json(line) for line in lines]
        steps = {str(one) for row in (first, *further) for one in row["steps"]}
        return Owner(
            cluster=str(first["cluster"]),
            job_id=int(first["job_id"]),
            restart_count=int(first["restart_count"]),
            steps=frozenset(steps),
            made_epoch_s=float(first["made_epoch_s"]),
            job_name=str(first["job_name"]),
            command=str(first["command"]),
            host=str(first["host"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _owner(run: RunDir) -> Owner | None:
    """The same for obeying it."""
    return read_owner(run) if is_trusted(run.job_jsonl, shared=True) else None


def _find(default: RunDir, me: Owner, environ: Mapping[str, str]) -> RunDir:
    answer: _Answer | None = None
    give_up_s = time.monotonic() + FOLLOW_S
    while True:
        there = _candidates(default)
        if (mine := _of_this_step(there, me)) is not None:
            return mine
        if not there or _is_free(there[-1]):
            made = _make(there[-1] if there else default, me)
            if made is not None:
                if len(there) > 1:  # another rank has only just made the folder, and comes second
                    _say_stranger(there[-2], made)
                return made
            time.sleep(0.01)  # another rank was first; network file systems may tell so late
            continue
        if not _is_ours(there[-1]):  # planted: who wants to use it refuses it, and says so
            return there[-1]
        if me.restart_count:
            newest = _newest(there, me)
            if newest is not None:
                return newest
        elif answer is None and any(_may_be(run, me) for run in there):
            if not _is_first(environ) and time.monotonic() < give_up_s:
                time.sleep(0.1)
                continue
            answer = _ask(me.job_id, environ)
        if answer is not None and (mine := _by_answer(there, me, answer)) is not None:
            _add_step(mine, me)
            return mine
        made = _make(_next(default, there), me)
        if made is not None:
            _say_stranger(there[-1], made)
            return made
        time.sleep(0.01)


@dataclass(frozen=True)
class _Answer:
    """What slurmctld says of this job; ``problem`` is why it says nothing."""

    restart_count: int = 0
    start_epoch_s: int | None = None
    problem: str | None = None


def _ask(job_id: int, environ: Mapping[str, str]) -> _Answer:
    from hydroslurm.slurm.client import open_client
    from hydroslurm.slurm.refusals import RetryPolicy

    try:
        retry_policy = RetryPolicy(call_timeout_s=_ANSWER_S, give_up_after_s=0.0)
        job = open_client(environ=environ, retry_policy=retry_policy).job(job_id)
    except (SlurmError, UsageError) as error:
        return _Answer(problem=" ".join(str(error).split()))
    return _Answer(job.restart_count, job.start_epoch_s)


def _by_answer(there: list[RunDir], me: Owner, answer: _Answer) -> RunDir | None:
    """The folder of this job among those that are there."""
    newest = _newest(there, me)
    if newest is None or answer.restart_count:  # the variable is lost by srun --export=NONE
        return newest
    if answer.problem is not None:
        # refusing would end every second job step where no Slurm program is (containers)
        _warn(
            f"{newest.root} is there already, and whether this job made it is not known: "
            f"{answer.problem}. It is gone on with. {rundir.RUN_DIR_ENV} names another run folder"
        )
        return newest
    owner = _owner(newest)
    used_epoch_s = owner.made_epoch_s if owner is not None else _written_epoch_s(newest)
    return newest if _is_since(used_epoch_s, answer.start_epoch_s) else None


def _is_since(epoch_s: float, start_epoch_s: int | None) -> bool:
    return start_epoch_s is not None and epoch_s >= start_epoch_s - CLOCKS_APART_S


def _written_epoch_s(run: RunDir) -> float:
    """When a folder of which nobody says whose it is was last written to: of an earlier version's
    job, or where job.jsonl could not be written (a full disk)."""
    found = [0.0]
    for path in _state(run):
        with contextlib.suppress(OSError):
            found.append(path.lstat().st_mtime)
    return max(found)


def _state(run: RunDir) -> tuple[Path, ...]:
    return (run.events, run.checkpoints, run.claim_json, run.attempts_jsonl, run.finished_json)


def _candidates(default: RunDir) -> list[RunDir]:
    """Oldest first."""
    name = re.compile(rf"{re.escape(default.root.name)}(?:-([0-9]{{1,9}}))?")
    try:
        names = [path.name for path in default.root.parent.iterdir()]
    except OSError:
        return []
    found = {int(match[1] or 1): one for one in names if (match := name.fullmatch(one))}
    return [RunDir(default.root.parent / found[number]) for number in sorted(found)]


def _next(default: RunDir, there: list[RunDir]) -> RunDir:
    if not there:
        return default
    _, _, number = there[-1].root.name.partition("-")
    return RunDir(default.root.with_name(f"{default.root.name}-{int(number or 1) + 1}"))


def _of_this_step(there: list[RunDir], me: Owner) -> RunDir | None:
    for run in reversed(there):
        owner = _owner(run)
        # a restart's srun can have the address of one of an attempt before
        if owner is not None and owner.may_be(me) and owner.steps & me.steps:
            return run
    return None


def _newest(there: list[RunDir], me: Owner) -> RunDir | None:
    return next((run for run in reversed(there) if _may_be(run, me)), None)


def _may_be(run: RunDir, me: Owner) -> bool:
    """Also one from before there were such files, which may be a restarted job's."""
    owner = _owner(run)
    return owner is None or owner.may_be(me)


def _is_free(run: RunDir) -> bool:
    """Whether nothing of a run is in it: a batch script may have made it for its logs."""
    has_state = any(map(os.path.lexists, _state(run)))
    # in this order: who takes the folder writes job.jsonl before anything else
    return not has_state and not os.path.lexists(run.job_jsonl) and _is_ours(run)


def _is_ours(run: RunDir) -> bool:
    try:
        run.check()
    except RunFolderError:
        return False
    return True


def _make(run: RunDir, me: Owner) -> RunDir | None:
    """Take the folder for this job; None when somebody else has just done so."""
    line = json.dumps({"v": 1, **asdict(me), "steps": sorted(me.steps)}).encode() + b"\n"
    try:
        run.claim()
    except RunFolderError:
        return run  # who wants to write there says it
    if not _is_free(run):
        return None
    try:
        write_atomically(run.job_jsonl, line, durable=True, exclusive=True)
    except FileExistsError:
        return None
    except OSError:  # a file system without hard links?
        return _write_in_place(run, line)
    return run


def _write_in_place(run: RunDir, line: bytes) -> RunDir | None:
    try:
        fd = os.open(run.job_jsonl, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return None
    except OSError:
        return run  # who writes there next has the better message
    with contextlib.suppress(OSError), os.fdopen(fd, "wb") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return run


def _add_step(run: RunDir, me: Owner) -> None:
    """So that the other ranks of this job step need not ask."""
    if me.steps and _owner(run) is not None:
        line = json.dumps({"steps": sorted(me.steps)}).encode() + b"\n"
        with contextlib.suppress(OSError):
            fd = open_regular(run.job_jsonl, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(fd, line)
            finally:
                os.close(fd)


def _is_first(environ: Mapping[str, str]) -> bool:
    return (environ.get("RANK") or environ.get("SLURM_PROCID") or "0") == "0"


def _say_stranger(before: RunDir, mine: RunDir) -> None:
    owner = _owner(before)
    whose = str(owner) if owner else "another job has begun"
    _warn(
        f"{before.root} is not used: {whose} there. This job's run folder is {mine.root}; "
        f"{rundir.RUN_DIR_ENV} names another one"
    )


def _warn(text: str) -> None:
    with contextlib.suppress(RuntimeWarning):  # nowhere is this worth a training
        warnings.warn(f"hydroslurm: {text}", RuntimeWarning, stacklevel=2)
