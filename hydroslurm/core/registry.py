"""The registry of pausable processes: one small file per process of this user on this machine.

A client that knows only a pid (``hydroslurm pause --pid N``) reads from it which signals the
process listens to and where it writes its events and its status. The file says
when the process started, so that a recycled pid is never taken for it.

    $XDG_RUNTIME_DIR/hydroslurm/           or  <temporary folder>/hydroslurm-<uid>/
                                           or  ~/.cache/hydroslurm/ranks-<boot>/
        <place>-<pid>.json                 a process; place: the host and pid namespace
        <place>-<pid>/events/...           the events of one that belongs to no run; gone with it

Containers, and the nodes of a shared temporary folder, have the folder in common and not the pids:
each process reads and removes only what was written where its own pid counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from hydroslurm.core.decoding import decode
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.core.proc import START_TICKS, boot_id, stat_of
from hydroslurm.core.trust import check_trusted, is_trusted
from hydroslurm.errors import RunFolderError, UntrustedFile

_LIMIT_BYTES = 1 << 16
"""Longest entry: a path, and some numbers."""


@dataclass(frozen=True)
class Entry:
    """One pausable process.

    Attributes:
        pid: its process id, as seen in its own pid namespace.
        started: when it started, in clock ticks since boot: tells it from a later process of the
            same pid.
        rank: global rank.
        events: its event file.
        signals: which signal it listens to for what; names of
            :class:`~hydroslurm.gate.signals.SignalPlan`.
    """

    pid: int
    started: int
    rank: int
    events: str
    signals: Mapping[str, int]


def folder(environ: Mapping[str, str]) -> Path:
    """The registry's folder for this user; made when it is missing.

    In a temporary folder another user can take the name first. Then a folder in the user's home is
    used, and stays in use for this boot, so that ranks and clients agree even if the name becomes
    free again.

    Raises:
        RunFolderError: it cannot be made, or others can write there: readers of an entry send the
            signals that it names, and believe the events that it points to.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    # below sudo it may be that of another user, who could exchange what root keeps there
    if runtime and os.access(runtime, os.W_OK) and is_trusted(Path(runtime)):
        return _made(Path(runtime) / "hydroslurm")
    in_home = Path(environ.get("HOME", ""), ".cache/hydroslurm", f"ranks-{boot_id()}")
    if in_home.is_absolute() and os.access(in_home, os.W_OK):
        return _made(in_home)
    try:
        return _made(Path(tempfile.gettempdir()) / f"hydroslurm-{os.getuid()}")
    except RunFolderError:
        with contextlib.suppress(OSError, RunFolderError):
            if in_home.is_absolute():
                in_home.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                return _made(in_home)
        raise


def places(environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The folders where a process with this environment may have announced itself. Creates
    nothing."""
    runtime, home = (environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "HOME"))
    temporary = [environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    found = [
        Path(runtime, "hydroslurm"),
        Path(home, ".cache/hydroslurm", f"ranks-{boot_id()}"),
        *(Path(place, f"hydroslurm-{os.getuid()}") for place in (*temporary, "/tmp")),
    ]
    return tuple(path for path in found if path.is_absolute())


def _made(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        check_trusted(path, what="the registry")
        owner = path.lstat().st_uid
    except OSError as error:
        raise RunFolderError(
            f"cannot make {path}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours"
        ) from error
    except UntrustedFile as error:
        raise RunFolderError(f"{error}; or set XDG_RUNTIME_DIR to a folder of yours") from error
    if owner != os.getuid():
        raise RunFolderError(
            f"{path} belongs to uid {owner}, not to us; set XDG_RUNTIME_DIR to a folder of yours"
        )
    return path


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is none."""
    try:
        return int(stat_of(pid)[START_TICKS])
    except OSError:
        return None


def place() -> str:
    """Where a pid is unique: this boot of this host, and this pid namespace.

    The host's name says less: two containers can share one, and one that shares the pids of its
    host can have another.
    """
    namespace = ""
    with contextlib.suppress(OSError):  # no /proc here
        namespace = str(Path("/proc/self/ns/pid").readlink())
    here = f"{boot_id() or socket.gethostname()} {namespace}"
    return f"{zlib.crc32(here.encode()):08x}"


def entry_file(base: Path, pid: int) -> Path:
    """Where a process of this pid namespace announces itself."""
    return base / f"{place()}-{pid}.json"


def private_events(base: Path, pid: int) -> Path:
    """The run folder of a process that belongs to no run."""
    return entry_file(base, pid).with_suffix("")


def announce(base: Path, entry: Entry) -> None:
    """Write the entry, whole or not at all, and clear away what dead processes left."""
    sweep(base)
    write_atomically(entry_file(base, entry.pid), json.dumps(asdict(entry)))


def withdraw(base: Path, pid: int) -> None:
    """Take the entry of a process away, and its private events with it."""
    entry_file(base, pid).unlink(missing_ok=True)
    shutil.rmtree(private_events(base, pid), ignore_errors=True)


def find(base: Path, pid: int) -> Entry | None:
    """The entry of a living process; None when it never announced itself or is another process by
    now, and for an entry that somebody else may have written."""
    path = entry_file(base, pid)
    try:
        entry = decode(Entry, read_regular(path, limit_bytes=_LIMIT_BYTES))
    except (OSError, ValueError):
        return None
    if entry.pid != pid or entry.started != start_ticks(pid):
        return None
    return entry if is_trusted(path) else None


def sweep(base: Path) -> None:
    """Remove the entries of processes that ended without withdrawing; those of another pid
    namespace or host may live."""
    for file in base.glob(f"{place()}-*.json"):
        pid = file.stem.partition("-")[2]
        if pid.isdecimal() and find(base, int(pid)) is None:
            withdraw(base, int(pid))
