"""The processes of a cluster: as /proc shows them, as cluster.json records them, and their end.

No process and no file outside the cluster's folder is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_VERSION = 2
_JOBS_END_S = 1.5
_CANCEL_LIMIT_S = 5.0
_SWEEPS = 5


@dataclass(frozen=True)
class ProcessId:
    """One process and no later one that got its number.

    Attributes:
        start_ticks: when it started, clock ticks since boot.
    """

    pid: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has this number now; None when there is none, or only a zombie."""
        stat = _stat(pid)
        return None if stat is None else cls(pid, int(stat[START_TICKS]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def send(self, signo: int) -> None:
        """Signal it; nothing when it is gone."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signo)


def descendants(pid: int) -> list[int]:
    """Every process below ``pid``, zombies left out."""
    children: dict[int, list[int]] = {}
    for other in pids():
        stat = _stat(other)
        if stat is not None:
            children.setdefault(int(stat[PARENT]), []).append(other)
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def find(matches: Callable[[int], bool]) -> list[int]:
    """Every process but this one that matches."""
    return [pid for pid in pids() if pid != os.getpid() and matches(pid)]


def holds_file_below(pid: int, folder: Path) -> bool:
    """Whether a process of this user has a file open in a folder, by its real name, or below."""
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
    """The process's short name; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """None when it is gone, or only a zombie."""
    try:
        stat = stat_of(pid)
    except OSError:
        return None
    return None if stat[STATE] in "ZX" else stat


def environment(pid: int) -> dict[str, str]:
    """What a process of this user was started with; empty when it is gone or has emptied it."""
    try:
        return environ_of(pid)
    except OSError:
        return {}


@dataclass(frozen=True)
class Daemon:
    """A daemon in the foreground, as a child of the supervisor.

    Attributes:
        log: all that it says, quoted when it dies.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def id(self) -> ProcessId | None:
        return ProcessId.of(self.process.pid)

    def tail_text(self) -> str:
        """Its last log lines, with their origin."""
        lines = "".join(f"\n  {line}" for line in tail(self.log))
        return f"The last lines of {self.log}:{lines or ' (it is empty)'}"


def reap(daemons: Sequence[Daemon]) -> None:
    """Collect every child that has ended, the orphans that this process inherited included."""
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
    """The last lines of a log file, none when it cannot be read."""
    try:
        with log.open(errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, _TAIL_LINES)]
    except OSError:
        return []


@dataclass(frozen=True)
class Running:
    """The cluster that runs in a folder.

    Attributes:
        up: False while it is being started.
        temporary: the folder is removed with the cluster.
        link: the short name of the folder.
        supervisor: the process that owns all others.
        daemons: name -> process.
    """

    spec: ClusterSpec
    up: bool
    temporary: bool
    link: Path
    supervisor: ProcessId
    daemons: tuple[tuple[str, ProcessId], ...] = ()
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
            row["daemons"] = tuple((name, ProcessId(**one)) for name, one in row["daemons"])
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
        detach: the cluster outlives the caller, once it is up.
        temporary: remove the folder with the cluster.
        path: where to look for programs.
        caller: the process with which the cluster ends.
    """

    spec: ClusterSpec
    root: Path
    detach: bool
    temporary: bool
    path: str
    caller: ProcessId

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Decode what :func:`to_json` has made."""
        row = json.loads(text)
        row["spec"], row["root"] = _spec(row["spec"]), Path(row["root"])
        return cls(**{**row, "caller": ProcessId(**row["caller"])})


def to_json(value: Running | Request) -> str:
    """Encode as one line; names of files may hold bytes that are no text."""
    return json.dumps(asdict(value), default=str)


def _spec(row: dict[str, Any]) -> ClusterSpec:
    directory = row["directory"]
    return ClusterSpec(**{**row, "directory": None if directory is None else Path(directory)})


def cancel_jobs(scancel: str, *, user: str, environ: Mapping[str, str]) -> None:
    """Cancel all jobs, and give them 1.5 s to end.

    Not all of KillWait: what still runs is killed with everything else.
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


def end_all(daemons: Sequence[Daemon], spec: ClusterSpec, *, limit_s: float = 15.0) -> None:
    """Kill all descendants of this process, a subreaper, and remove their cgroups.

    With SIGKILL, daemons too: what they would save is about to be removed. Until two looks in a row
    find nobody: a process may fork while it is being listed, and be gone when its parent is asked.
    """
    deadline = time.monotonic() + limit_s
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

    The daemons died with their supervisor, but job steps and tasks did not. A shell that only
    points to the cluster (`hydroslurm cluster env`) is not a task and stays.
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
    """The job steps of a cluster without a supervisor, and their descendants.

    Tasks are recognized by the environment that slurmd and sbatch gave them. So is slurmstepd up to
    24.05; newer ones empty theirs (seen on 25.11), but each has its node's log in the cluster's
    folder open. With cgroups, the cgroup lists them all.
    """
    confs = {str(layout.slurm_conf), str(running.link / "conf/slurm.conf")}
    root = layout.root.resolve()

    def ours(pid: int) -> bool:
        environ = environment(pid)
        is_task = (
            environ.get("SLURM_CONF") in confs
            and "SLURM_JOB_ID" in environ
            and environ.get("SLURMD_NODENAME") in running.spec.node_names
        )
        if is_task or environ.get(CLUSTER_ENV) == str(layout.root):
            return True
        return command_name(pid) == "slurmstepd" and holds_file_below(pid, root)

    found = {*find(ours), *cgroups.processes_of(running.spec)}
    below = {child for pid in found for child in descendants(pid)}
    return [p for pid in (found | below) - {os.getpid()} if (p := ProcessId.of(pid))]


def _job_steps() -> bool:
    return any(command_name(pid) == "slurmstepd" for pid in descendants(os.getpid()))
