"""plugstack.conf: where this machine's Slurm reads it, and the line in it that names the plugin.

It says ``optional``: were the file not there one day, Slurm would go on without it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.files import atomic_file
from hydroslurm.errors import SlurmError, SlurmMissing, SpankError
from hydroslurm.slurm.client import open_client
from hydroslurm.slurm.config import find_slurm_conf
from hydroslurm.slurm.spank.build import PLUGIN

MARK = "# --preempt for srun, sbatch and salloc; made by `hydroslurm spank install`"


@dataclass(frozen=True)
class Change:
    """What is to become of plugstack.conf.

    Attributes:
        path: of the file.
        before, after: what it holds; equal where there is nothing to do.
    """

    path: Path
    before: str
    after: str

    @property
    def message(self) -> str:
        """For a person, line by line."""
        if self.before == self.after:
            return f"{self.path}: nothing to change"
        old, new = _lines(self.before), _lines(self.after)
        lines = [f"  - {line}" for line in old if line not in new]
        lines += [f"  + {line}" for line in new if line not in old]
        return "\n".join([f"{self.path}:", *lines])


def plugstack_of(environ: Mapping[str, str]) -> Path:
    """What PlugStackConfig says, else the file beside slurm.conf.

    Raises:
        SlurmMissing: there is no slurm.conf here.
    """
    try:
        named = open_client(environ=environ).config().get("PlugStackConfig")
    except SlurmError:  # slurmctld need not be up for this
        named = None
    if named and named != "(null)":
        return Path(named)
    conf = find_slurm_conf(environ)
    if conf is None:
        raise SlurmMissing("no slurm.conf on this machine; name the file with --plugstack")
    return conf.parent / "plugstack.conf"


def added(path: Path, plugin: Path) -> Change:
    """The file with the plugin in it, once: where one was before, else at the end. All other lines
    stay as they are.

    Raises:
        SpankError: it cannot be read; the path of the plugin cannot stand in it.
    """
    if any(c.isspace() or c == "#" for c in str(plugin)):
        raise SpankError(f"{plugin}: plugstack.conf cannot hold a path with blanks or #")
    before = _read(path)
    lines, ours = _lines(before), [MARK, f"optional {plugin}"]
    at = next((n for n, line in enumerate(lines) if _names_plugin(line)), len(lines))
    return Change(path, before, _joined([*_without(lines[:at]), *ours, *_without(lines[at:])]))


def removed(path: Path) -> Change:
    """The file without it.

    Raises:
        SpankError: it cannot be read.
    """
    before = _read(path)
    return Change(path, before, _joined(_without(_lines(before))))


def apply(change: Change) -> None:
    """Write it, whole or not at all, with the mode and the owner that it had. A link stays one.

    Raises:
        SpankError: it cannot be written.
    """
    if change.before == change.after:
        return
    path = change.path.resolve()
    try:
        had = path.stat() if path.exists() else None
        with atomic_file(path) as file:
            if had is not None and (had.st_uid, had.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(file.fileno(), had.st_uid, had.st_gid)
            os.fchmod(file.fileno(), 0o644 if had is None else had.st_mode & 0o7777)
            file.write(change.after.encode(errors="surrogateescape"))
    except OSError as error:
        raise SpankError(
            f"cannot write {change.path}: {error.strerror}. It belongs to the administrators; as "
            "one of them run the same command again"
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise SpankError(f"cannot read {path}: {error.strerror}") from error


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def _without(lines: list[str]) -> list[str]:
    """All lines but ours, and but any other that loads a plugin of this name."""
    return [line for line in lines if line != MARK and not _names_plugin(line)]


def _names_plugin(line: str) -> bool:
    fields = line.partition("#")[0].split()
    return (
        len(fields) >= 2
        and fields[0] in ("optional", "required")
        and Path(fields[1]).name == PLUGIN
    )


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
