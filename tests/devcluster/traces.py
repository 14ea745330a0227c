"""What a cluster may leave behind, looked for without the package's own help."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection
from pathlib import Path

import pytest

from hydroslurm.devcluster import processes


def processes_of(mark: str) -> list[str]:
    """Every living process whose command line, first environment or working directory mentions
    ``mark``, in words."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            text = (entry / "cmdline").read_bytes() + b"\0" + (entry / "environ").read_bytes()
            text += bytes((entry / "cwd").readlink())
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z" and mark.encode() in text:
            found.append(f"{entry.name} {state} {text[:120]!r}")
    return found


def links_to(folder: Path) -> list[Path]:
    """Every link that leads to a cluster's folder, in the temporary folders."""
    links = [
        private / "c"
        for place in {tempfile.gettempdir(), "/tmp", "/dev/shm"}
        for private in map(Path, _names(place))
    ]
    return [link for link in links if link.is_symlink() and os.path.realpath(link) == str(folder)]


def system_files() -> set[str]:
    """What lies where Slurm, munge and MariaDB keep their files unless told otherwise."""
    places = ("/run", "/run/munge", "/run/mysqld", "/var/spool", "/var/log", "/var/lib", "/var/tmp")
    names = {name for place in places for name in _names(place)}
    return {n for n in names if any(w in n for w in ("slurm", "munge", "mysql", "mariadb"))}


def _names(place: str) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(place)]
    except OSError:
        return []


def without_environment(patch: pytest.MonkeyPatch, pids: Collection[int]) -> None:
    """As if these processes had none: Slurm 25.11 empties that of slurmstepd."""
    asked = processes.environ_of
    patch.setattr(processes, "environ_of", lambda pid: {} if pid in pids else asked(pid))
