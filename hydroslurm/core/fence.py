"""Which attempt holds a run folder: the newest, and no other one may write there.

A requeued job can have ranks of its dead attempt alive: on a node that did not answer for a while,
or stopped. ``claim.json`` in the run folder names the newest attempt. It is replaced as a whole,
and an attempt looks, before whatever cannot be undone, whether the claim is still its own.

There is no lock, because the process that holds one may be the very one that hangs, and locks of
network file systems hang with their server. What a look leaves open, until the act that it allows,
is closed by the new attempt where it matters: it takes the folders of unfinished saves away (see
``checkpoint.folders.revoke``), so that their last rename fails, and it pins what it loads. A line
in ``attempts.jsonl`` or ``finished.json`` can still come in that moment; the second is true even
so.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from json import dumps
from pathlib import Path
from typing import Any

from hydroslurm.core.command import Command
from hydroslurm.core.decoding import decode
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.core.proc import START_TICKS, STATE, stat_of
from hydroslurm.errors import RunFolderError, StaleAttempt

LIMIT_BYTES = 64 * 1024
_CLOCK_CHANGE_S = 2.0
"""Tolerated change of the clock since a process recorded its start."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """How an attempt identifies itself.

    Attributes:
        token: random; no two attempts have the same.
        since_epoch_ns: time of the claim.
        began_epoch_s: start of the claiming process.
        cluster, job_id, restart_count: Slurm's; "", 0 and 0 outside of a job.
        host, pid: of that process.
        script, command: of its :class:`~hydroslurm.core.command.Command`, ``stable`` of it; "" for
            none.
        step_id: SLURM_STEP_ID; "" outside of a job step.
    """

    token: str
    since_epoch_ns: int
    began_epoch_s: float
    cluster: str
    job_id: int
    restart_count: int
    host: str
    pid: int
    script: str = ""
    command: str = ""
    step_id: str = ""

    def is_of_start(self, other: Claim) -> bool:
        """Whether both are of one start of one job."""
        one_job = self.job_id > 0 and (self.cluster, self.job_id) == (other.cluster, other.job_id)
        return one_job and self.restart_count == other.restart_count

    def is_earlier_than(self, other: Claim) -> bool:
        """Whether both are of one job, and Slurm has started the other one later.

        The count alone does not tell: SLURM_RESTART_COUNT is lost where an environment is emptied
        (``srun --export=NONE``, containers) and where somebody adds a process by ``srun --jobid``.
        """
        one_job = self.job_id > 0 and (self.cluster, self.job_id) == (other.cluster, other.job_id)
        return (
            one_job
            and self.restart_count < other.restart_count
            and self.began_epoch_s < other.began_epoch_s
        )

    def lives_here(self) -> bool:
        """Whether its process has not ended, on this machine."""
        try:
            began_epoch_s = process_began_epoch_s(self.pid)
        except OSError:
            return False
        return abs(began_epoch_s - self.began_epoch_s) < _CLOCK_CHANGE_S

    def __str__(self) -> str:
        if not self.job_id:
            return f"process {self.pid} on {self.host}"
        which = f"job {self.job_id}, restart {self.restart_count}"
        return f"{which} (process {self.pid} on {self.host})"


class Fence:
    """One attempt's view of the claim on its run folder. Safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        *,
        cluster: str = "",
        job_id: int = 0,
        restart_count: int = 0,
        step_id: str = "",
    ) -> None:
        """Touches no disk."""
        self.path = path
        command = Command.of_this_process()
        self.me = Claim(
            token=secrets.token_hex(16),
            since_epoch_ns=0,
            began_epoch_s=process_began_epoch_s(),
            cluster=cluster,
            job_id=job_id,
            restart_count=restart_count,
            host=socket.gethostname(),
            pid=os.getpid(),
            script=command.script,
            command=command.stable,
            step_id=step_id,
        )
        self._held: Claim | None = None

    def claim(self) -> dict[str, Any]:
        """Make this attempt the newest; called by one rank. Returns, as plain JSON, what the others
        :meth:`hold`.

        Raises:
            StaleAttempt: Slurm has started this job again since this process began.
            RunFolderError: the folder cannot be written.
        """
        mine = Claim(**{**asdict(self.me), "since_epoch_ns": time.time_ns()})
        found = self.holder()
        if found is not None and mine.is_earlier_than(found):
            raise self._stale("the start", found)
        try:
            self._write(mine)
        except OSError as error:
            raise RunFolderError(
                f"cannot write {self.path}: {error.strerror}. The run's folder must be on a file "
                "system that this node can write"
            ) from error
        self._held = mine
        return asdict(mine)

    def holder(self) -> Claim | None:
        """Return the claim on the folder; None if there is none."""
        try:
            return self._read()
        except OSError:  # a link, a FIFO ...: the rename replaces it
            return None

    def hold(self, claim: Mapping[str, Any]) -> None:
        """Join the attempt that has made this claim."""
        self._held = Claim(**claim)

    def check(self, what: str) -> None:
        """Require that no newer attempt has claimed the folder. Reads one small file.

        A folder without a claim, or with an unreadable one, is free. A process without a claim
        gives way only to a later start of its own job.

        Args:
            what: the act that depends on it, for the message: "the save of step 5".

        Raises:
            StaleAttempt: says who has claimed it, and since when.
            OSError: the claim cannot be read.
        """
        found = self._read()
        if found is None:
            return
        if self._held is None:
            if self.me.is_earlier_than(found):
                raise self._stale(what, found)
        elif found.token != self._held.token:
            if not found.is_earlier_than(self._held):
                raise self._stale(what, found)
            # it had looked before we claimed, and wrote after it
            self._write(self._held)

    def _stale(self, what: str, found: Claim) -> StaleAttempt:
        since = datetime.fromtimestamp(found.since_epoch_ns / 1e9, tz=timezone.utc)
        return StaleAttempt(
            f"{what} is not done: {found} holds {self.path.parent} since {since:%Y-%m-%d %H:%M:%S} "
            f"UTC, and this is {self._held or self.me}. Only the newest attempt of a run may "
            "write; two runs need two folders: Run(directory=...)"
        )

    def _read(self) -> Claim | None:
        """The claim; None when there is none that can be understood."""
        try:
            return decode(Claim, read_regular(self.path, limit_bytes=LIMIT_BYTES))
        except (FileNotFoundError, ValueError):  # by a later version, or damaged
            return None

    def _write(self, claim: Claim) -> None:
        """Killed anywhere, there is the old claim or the new one, and both can be replaced."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, dumps({"v": 1, **asdict(claim)}), durable=True)


def process_began_epoch_s(pid: int | None = None) -> float:
    """When a process, by default this one, was started.

    Raises:
        OSError: there is no such process.
        ProcessLookupError: it is a zombie.
    """
    stat = stat_of(pid or "self")
    if stat[STATE] in "ZX":
        raise ProcessLookupError(pid)
    began_s = int(stat[START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + began_s
