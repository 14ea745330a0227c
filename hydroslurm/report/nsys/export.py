"""``.nsys-rep`` -> SQLite, by nsys itself: its own format is not documented."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hydroslurm.core.trust import is_trusted
from hydroslurm.errors import NsysMissing, ProfileError

EXPORT_TIMEOUT_S = 1800
"""Minutes are usual for a report of gigabytes."""
REPORT_SUFFIX = ".nsys-rep"
RAW_SUFFIX = ".qdstrm"
SQLITE_SUFFIX = ".sqlite"
_PREFIX = ".nsys-export-"


def find_nsys() -> str | None:
    """The program: of PATH, else beside this Python, where setup.sh puts it."""
    return shutil.which("nsys") or shutil.which("nsys", path=str(Path(sys.executable).parent))


def profiles_in(folder: Path) -> tuple[Path, ...]:
    """The reports in a folder, by name; of one that was exported already only the report."""
    found = {}
    for suffix in (SQLITE_SUFFIX, REPORT_SUFFIX):
        for path in folder.glob(f"*{suffix}"):
            found[path.name.removesuffix(suffix)] = path
    return tuple(path for _, path in sorted(found.items()))


@contextlib.contextmanager
def as_sqlite(path: Path) -> Iterator[Path]:
    """``path`` itself, or what it is exported to: beside it where that can be written, else in a
    temporary folder that is gone afterwards. An export that is newer than its report is used again,
    if nobody could have made it who could not have written the report.

    Raises:
        NsysMissing: it has to be exported, and there is no ``nsys``.
        ProfileError: no such file, or nsys cannot export it.
    """
    if not path.is_file():
        raise ProfileError(f"{path}: no such file; wanted a report of nsys, or its SQLite export")
    if path.suffix == RAW_SUFFIX:
        raise ProfileError(
            f"{path}: what nsys recorded and could not finish, because it was killed or has no "
            "importer; turn it into a report with the QdstrmImporter of the same nsys: "
            f"QdstrmImporter -i {path.name}"
        )
    if path.suffix != REPORT_SUFFIX:
        yield path
        return
    beside = path.with_suffix(SQLITE_SUFFIX)
    is_newer = beside.is_file() and beside.stat().st_mtime_ns >= path.stat().st_mtime_ns
    if is_newer and _is_as_good_as(path, beside):
        yield beside
        return
    nsys = find_nsys()
    if nsys is None:
        raise NsysMissing(
            f"{path}: only nsys can read it, and there is none on PATH; on a machine that has it "
            f"run `nsys export --type sqlite {path.name}` and give {beside.name} instead"
        )
    try:
        beside_it = path.parent if is_trusted(path.parent, shared=True) else None
        temporary = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=beside_it)
    except OSError:  # another user's report, or a full disk
        temporary = tempfile.TemporaryDirectory(prefix=_PREFIX)
    with temporary as folder:
        made = Path(folder, beside.name)
        _export(nsys, path, made)
        with contextlib.suppress(OSError):
            made = made.replace(beside) if made.parent.parent == path.parent else made
        yield made


def _is_as_good_as(report: Path, beside: Path) -> bool:
    """Whether an export can be believed as far as its report: it lies in the same folder, so that
    only its owner and its mode can make a difference."""
    status = beside.lstat()
    owners = {os.getuid(), 0, report.stat().st_uid}
    others = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != report.stat().st_gid else 0)
    return stat.S_ISREG(status.st_mode) and status.st_uid in owners and not status.st_mode & others


def _export(nsys: str, report: Path, made: Path) -> None:
    """Raises ProfileError: with what nsys said."""
    argv = [nsys, "export", "--type", "sqlite", "--force-overwrite", "true"]
    try:
        done = subprocess.run(
            [*argv, "--output", str(made), str(report)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=EXPORT_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProfileError(f"{report}: nsys could not export it: {error}") from None
    if done.returncode != 0 or not made.is_file():
        said = [line for line in done.stdout.replace("\r", "\n").splitlines() if line.strip()]
        raise ProfileError(
            f"{report}: `{nsys} export` ended with {done.returncode}: "
            f"{' '.join(said[-3:]) or 'it said nothing'}; a report that was cut off, or of a newer "
            "nsys, has to be exported by the nsys that wrote it"
        )
