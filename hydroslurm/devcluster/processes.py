"""The processes of a cluster: in /proc, in cluster.json, and their end.

No process and no file outside the cluster's folder remains.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydroslurm.core.files import write_atomically
from hydroslurm.core.proc import PARENT, START_TICKS, STATE, environ_of, pids, stat_of
from hydroslurm.devcluster import cgroups, network
from hydroslurm.devcluster.layout import CLUSTER_ENV, Layout, remove_link
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError

_TAIL_LINES = 12
_VERSION = 3
_JOBS_END_S = 1.5
_CANCEL_LIMIT_S = 5.0
_END_LIMIT_S = 15.0
_SWEEPS = 5


@dataclass(frozen=True)
class ProcessId:
    """One process, as opposed to a later one with its number.

    Attributes:
        start_ticks: its start, in clock ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """Return the current process with this number; None if there is none, or a zombie."""
        stat = _stat(pid)
        return None if stat is None else cls(pid, int(stat[START_TICKS]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, signo: int) -> None:
        """Signal it; do nothing if it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signo)


def descendants(pid: int) -> list[int]:
    """Return every process below ``pid``, without zombies."""
    children: dict[int, list[int]] = {}
    for other in pids():
        stat = _stat(other)
        if stat is not None:
            children.setdefault(int(stat[PARENT]), []).append(other)
    result: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        result += below
        waiting += below
    return result


def holds_file_below(pid: int, folder: Path) -> bool:
    """Whether a process of this user has a file open in or below a folder, by its real path."""
    try:
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in opened:
        with contextlib.suppress(OSError):
            if descriptor.readlink().is_relative_to(folder):
                return True
    return False


def end(processes: Iterable[ProcessId], *, limit_s: float = 10.0) -> None:
    """Kill processes and wait until they are gone, or until ``limit_s`` has passed."""
    waiting = list(processes)
    for process in waiting:
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + limit_s
    while any(process.alive for process in waiting) and time.monotonic() < deadline:
        time.sleep(0.01)


def command_name(pid: int) -> str:
    """Return the process's short name; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """Return None if it is gone, or a zombie."""
    try:
        stat = stat_of(pid)
    except OSError:
        return None
    return None if stat[STATE] in "ZX" else stat


@dataclass(frozen=True)
class Daemon:
    """A daemon in the foreground, as a child of the supervisor.

    Attributes:
        log: its output, quoted if it dies.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def id(self) -> ProcessId | None:
        return ProcessId.of(self.process.pid)

    def tail_text(self) -> str:
        """Return its last log lines, with their origin."""
        lines = "".join(f"\n  {line}" for line in tail(self.log))
        return f"The last lines of {self.log}:{lines or ' (it is empty)'}"


def reap(daemons: Sequence[Daemon]) -> None:
    """Reap every child that has ended, including inherited orphans."""
    known = {daemon.process.pid: daemon for daemon in daemons}
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        if ended.si_pid in known:
            known[ended.si_pid].process.poll()
        else:
            os.waitpid(ended.si_pid, os.WNOHANG)


def tail(log: Path) -> list[str]:
    """Return the last lines of a log file; none if it is unreadable."""
    try:
        with log.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, _TAIL_LINES)]
    except OSError:
        return []


@dataclass(frozen=True)
class Running:
    """The cluster that runs in a folder.

    Attributes:
        temporary: the folder is removed with the cluster.
        link: short path of the folder.
        supervisor: the process that owns all others.
        daemons: name -> process; none while it is starting.
        no_preempt: why srun has no ``--preempt`` here; empty if it has.
    """

    spec: ClusterSpec
    temporary: bool
    link: Path
    supervisor: ProcessId
    daemons: tuple[tuple[str, ProcessId], ...] = ()
    no_preempt: str = ""
    version: int = _VERSION

    def write(self, layout: Layout) -> None:
        """Write cluster.json atomically."""
        write_atomically(layout.cluster_json, to_json(self) + "\n", mode=0o666)

    @classmethod
    def read(cls, layout: Layout) -> Running | None:
        """Read cluster.json; None if there is none.

        Raises:
            ClusterError: the file is not one of ours.
            UntrustedFile: others could have written it; it decides what we signal, remove and run.
        """
        layout.check()
        try:
            row = json.loads(layout.cluster_json.read_text())
            if row["version"] != _VERSION:
                raise ValueError(f"version {row['version']}, not {_VERSION}")
            row["spec"], row["link"] = _spec(row["spec"]), Path(row["link"])
            row["supervisor"] = ProcessId(**row["supervisor"])
            row["daemons"] = tuple((name, ProcessId(**process)) for name, process in row["daemons"])
            return cls(**row)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(
                f"{layout.cluster_json} cannot be read ({error}); it was made by another release. "
                "End that cluster with the release that started it, or remove the file"
            ) from error


@dataclass(frozen=True)
class Request:
    """A caller's request for a cluster.

    Attributes:
        spec: with a directory.
        detach: the cluster outlives the caller, once it is up.
        temporary: remove the folder with the cluster.
        caller: the process with which the cluster ends.
    """

    spec: ClusterSpec
    detach: bool
    temporary: bool
    caller: ProcessId

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Decode the output of :func:`to_json`."""
        row = json.loads(text)
        row["spec"], row["caller"] = _spec(row["spec"]), ProcessId(**row["caller"])
        return cls(**row)


def to_json(value: Running | Request) -> str:
    """Encode as one line; file names may contain bytes that are not text."""
    return json.dumps(asdict(value), default=str)


def _spec(row: dict[str, Any]) -> ClusterSpec:
    directory = row["directory"]
    return ClusterSpec(**{**row, "directory": None if directory is None else Path(directory)})


def cancel_jobs(scancel: str, *, user: str, environ: Mapping[str, str]) -> None:
    """Cancel all jobs, and give them 1.5 s to end.

    Not all of KillWait: anything still running is killed with the rest.
    """
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        subprocess.run(
            [scancel, f"--user={user}"],
            env=dict(environ),
            capture_output=True,
            timeout=_CANCEL_LIMIT_S,
            check=False,
        )
    deadline = time.monotonic() + _JOBS_END_S
    while _job_steps() and time.monotonic() < deadline:
        time.sleep(0.02)


def end_all(daemons: Sequence[Daemon], spec: ClusterSpec) -> None:
    """Kill all descendants of this process, a subreaper, and remove their cgroups.

    Use SIGKILL even for daemons: what they would save is about to be removed. Repeat until two
    scans in a row are empty: a process may fork while it is listed, and be gone when its parent is
    asked.
    """
    deadline = time.monotonic() + _END_LIMIT_S
    looks_without_any = 0
    while looks_without_any < 2 and time.monotonic() < deadline:
        below = [p for pid in descendants(os.getpid()) if (p := ProcessId.of(pid))]
        looks_without_any = 0 if below else looks_without_any + 1
        cgroups.thaw(spec)
        end(below, limit_s=1.0)
        reap(daemons)
    cgroups.remove(spec)
    network.remove(spec)


def sweep(layout: Layout, running: Running) -> None:
    """End and remove what is left of a cluster whose supervisor was killed.

    Its daemons died with it, but job steps and tasks did not. A shell that only points to the
    cluster (`hydroslurm cluster env`) is not a task and stays.
    """
    end(process for _, process in running.daemons)
    for _ in range(_SWEEPS):  # a process may fork before it is killed
        if strays := _strays(layout, running):
            cgroups.thaw(running.spec)
            end(strays)
    cgroups.remove(running.spec)
    network.remove(running.spec)
    remove_link(running.link)
    layout.remove_state()
    if running.temporary:
        layout.remove_all()


def _strays(layout: Layout, running: Running) -> list[ProcessId]:
    """Return the job steps of a cluster without a supervisor, and their descendants.

    Tasks are recognized by their environment from slurmd and sbatch. So is slurmstepd up to 24.05;
    newer ones clear theirs (seen on 25.11), but each has its node's log in the cluster's folder
    open. With cgroups, the cgroup lists them all.
    """
    confs = {str(layout.slurm_conf), str(running.link / "conf/slurm.conf")}
    root = layout.root.resolve()

    def ours(pid: int) -> bool:
        environ: dict[str, str] = {}
        with contextlib.suppress(OSError):  # it is gone, or another user's
            environ = environ_of(pid)
        is_task = (
            environ.get("SLURM_CONF") in confs
            and "SLURM_JOB_ID" in environ
            and environ.get("SLURMD_NODENAME") in running.spec.node_names
        )
        if is_task or environ.get(CLUSTER_ENV) == str(layout.root):
            return True
        return command_name(pid) == "slurmstepd" and holds_file_below(pid, root)

    roots = {pid for pid in pids() if pid != os.getpid() and ours(pid)}
    roots.update(cgroups.processes_of(running.spec))
    below = {child for pid in roots for child in descendants(pid)}
    return [p for pid in (roots | below) - {os.getpid()} if (p := ProcessId.of(pid))]


def _job_steps() -> bool:
    return any(command_name(pid) == "slurmstepd" for pid in descendants(os.getpid()))
