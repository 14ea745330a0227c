"""How much more memory this process may take before the kernel kills it or a neighbour.

Read from the limits of its cgroup and all its ancestors (v1 and v2), and from what the machine has
available. Slurm's ``ConstrainRAMSpace`` and containers set such limits, and the kernel kills a job
that exceeds them without warning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

KEPT_FREE = 0.1
"""The fraction of a limit that is left alone: page tables, stacks and the kernel's own memory count
against it too."""

_UNLIMITED_BYTES = 1 << 60
"""v1 says "no limit" by a number near 2**63."""


@dataclass(frozen=True)
class Room:
    """What one process may still take.

    Attributes:
        free_bytes: how much; of a bound by itself it is not known.
        limit_bytes, used_bytes: of the tightest bound; page cache that the kernel can drop does not
            count as used.
        bound: what that bound is, for people.
    """

    free_bytes: int
    limit_bytes: int
    used_bytes: int
    bound: str

    @property
    def message(self) -> str:
        """For people."""
        return f"{_mb(self.used_bytes)} of {_mb(self.limit_bytes)} MB of {self.bound} are in use"


def room(*, ranks_here: int = 1, root: Path = Path("/")) -> Room:
    """What this process may take: its fair share among the ranks on this node.

    What the process needs at its own peak is reserved for it: what it has used for a moment within
    a step, it will use again. What the system does not report is not a bound.

    Args:
        root: where /proc and /sys are; for tests.
    """
    bounds = [*_cgroup_bounds(root), *_machine_bound(root)]
    if not bounds:
        return Room(_UNLIMITED_BYTES, _UNLIMITED_BYTES, 0, "this machine")

    def free_bytes(bound: Room) -> int:
        kept = int(bound.limit_bytes * KEPT_FREE)
        return (bound.limit_bytes - kept - bound.used_bytes) // ranks_here

    narrowest = min(bounds, key=free_bytes)
    return replace(narrowest, free_bytes=max(0, free_bytes(narrowest) - _below_peak_bytes(root)))


def _machine_bound(root: Path) -> list[Room]:
    fields = _fields(root / "proc/meminfo")
    total, available = fields.get("MemTotal:"), fields.get("MemAvailable:")
    if total is None or available is None:
        return []
    return [Room(0, total * 1024, (total - available) * 1024, "this machine")]


def _cgroup_bounds(root: Path) -> list[Room]:
    """Of the cgroup of this process, and of all visible ancestors."""
    found = []
    for folder, is_v2 in _cgroups(root):
        limit, used, total = (
            ("memory.max", "memory.current", "")
            if is_v2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        )
        limit_bytes, usage_bytes = _number(folder / limit), _number(folder / used)
        if limit_bytes is None or usage_bytes is None or limit_bytes >= _UNLIMITED_BYTES:
            continue
        # page cache stays until somebody needs the memory, also of files that are read each epoch
        stat = _fields(folder / "memory.stat")
        dropped_bytes = sum(stat.get(f"{total}{one}_file", 0) for one in ("inactive", "active"))
        used_bytes = max(0, usage_bytes - dropped_bytes)
        found.append(Room(0, limit_bytes, used_bytes, f"the limit in {folder}"))
    return found


def _cgroups(root: Path) -> list[tuple[Path, bool]]:
    """The folders of this process's memory cgroup and its ancestors, and whether they are v2."""
    mounts = _mounts(root)
    found = []
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            kind = "memory"
        elif number == "0" and not controllers:
            kind = "v2"
        else:
            continue
        if kind not in mounts:
            continue
        top, point = mounts[kind]
        # in a container, the root of the mount may be the container's own cgroup
        inner = PurePosixPath(path)
        below = inner.relative_to(top) if inner.is_relative_to(top) else PurePosixPath()
        folder = root / point.lstrip("/") / below
        depth = len(below.parts)
        found += [(one, kind == "v2") for one in (folder, *folder.parents[:depth])]
    return found


def _mounts(root: Path) -> dict[str, tuple[PurePosixPath, str]]:
    """ "memory" and "v2" -> the cgroup that is mounted, and where."""
    found: dict[str, tuple[PurePosixPath, str]] = {}
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, described = line.partition(" - ")
        kind, _, options = described.partition(" ")
        fields = mounted.split()
        if len(fields) < 5:
            continue
        top, point = PurePosixPath(fields[3]), fields[4].replace("\\040", " ")
        if kind == "cgroup2":
            found.setdefault("v2", (top, point))
        elif kind == "cgroup" and "memory" in options.split()[-1].split(","):
            found.setdefault("memory", (top, point))
    return found


def _below_peak_bytes(root: Path) -> int:
    """How far this process is below its own peak."""
    fields = _fields(root / "proc/self/status")
    return max(0, fields.get("VmHWM:", 0) - fields.get("VmRSS:", 0)) * 1024


def _fields(path: Path) -> dict[str, int]:
    """The lines of a name and a number, and perhaps more."""
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _number(path: Path) -> int | None:
    """The number that a file holds; None for "max", and where there is no such file."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f}"
