"""Find the programs that a dev cluster needs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.errors import ClusterError

# daemons are in folders that an ordinary user's PATH lacks
SBIN = ("/usr/sbin", "/sbin", "/usr/local/sbin")

# program -> the Debian package that contains it
_PACKAGES = {
    "munged": "munge",
    "mariadbd": "mariadb-server-core",
    "slurmdbd": "slurmdbd",
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sinfo": "slurm-client",
    "sacctmgr": "slurm-client",
    "scancel": "slurm-client",
}
_COMPILERS = ("cc", "gcc", "g++", "clang")
_COMPILER_PACKAGE = "g++"


@dataclass(frozen=True)
class Programs:
    """The programs' paths, and the PATH that was searched."""

    paths: Mapping[str, str]
    compiler: str
    path: str

    def __getitem__(self, name: str) -> str:
        return self.paths[name]

    @property
    def plugins(self) -> Path | None:
        """Slurm's plugins beside its programs: ``lib/slurm``, which Debian's own Slurm has not."""
        folder = Path(self["slurmctld"]).resolve().parents[1] / "lib/slurm"
        return folder if folder.is_dir() else None


def search_path(path: str | None) -> str:
    """Return a PATH with the daemons' folders at its end. A Slurm beside this Python, where
    setup.sh unpacks one without root, comes first: the site's may be of another release."""
    own = Path(sys.executable).parent
    first = [str(own)] if (own / "slurmctld").exists() else []
    given = [part for part in (path or os.defpath).split(os.pathsep) if part not in ("", *first)]
    return os.pathsep.join([*first, *given, *(part for part in SBIN if part not in given)])


def missing(path: str) -> dict[str, str]:
    """Return program -> Debian package for each program missing in the folders of ``path``."""
    absent = {
        name: package
        for name, package in _PACKAGES.items()
        if shutil.which(name, path=path) is None
    }
    if _compiler(path) is None:
        absent["a C compiler"] = _COMPILER_PACKAGE
    return absent


def find_programs(path: str) -> Programs:
    """Find every program on ``path``.

    Raises:
        ClusterError: one is missing; the message has its name, its Debian package and what to run.
    """
    absent = missing(path)
    if absent:
        raise ClusterError(missing_message(absent))
    paths = {name: shutil.which(name, path=path) or name for name in _PACKAGES}
    return Programs(paths, _compiler(path) or "", path)


def missing_message(absent: Mapping[str, str]) -> str:
    """Return in one line what is missing and how to get it."""
    names = ", ".join(f"{name} (Debian package {package})" for name, package in absent.items())
    packages = " ".join(sorted(set(absent.values())))
    return (
        f"not found: {names}. Install with: "
        f"sudo apt-get install -y --no-install-recommends {packages}"
    )


def system_tables_sql(mariadbd: str) -> Path:
    """Return the server's SQL file that creates its system tables.

    Raises:
        ClusterError: it is in none of the usual places.
    """
    # mariadb-install-db would do, but needs my_print_defaults, from another Debian package than the
    # server, and adds help texts and time zones that nobody needs here
    prefix = Path(mariadbd).resolve().parent.parent
    tried = list(_system_tables_places((prefix, Path("/usr"))))
    for place in tried:
        if place.is_file():
            return place
    raise ClusterError(
        f"the server {mariadbd} has no system tables; looked for {', '.join(map(str, tried))}. "
        "Reinstall it: sudo apt-get install --reinstall mariadb-server-core"
    )


def _system_tables_places(prefixes: Iterable[Path]) -> Iterable[Path]:
    for prefix in prefixes:
        for folder in ("mariadb", "mysql"):
            for name in ("mariadb_system_tables.sql", "mysql_system_tables.sql"):
                yield prefix / "share" / folder / name


def _compiler(path: str) -> str | None:
    return next((file for name in _COMPILERS if (file := shutil.which(name, path=path))), None)
