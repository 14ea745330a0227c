"""The processes of a rank: its workers, and the coordinator, which is a child of rank 0."""

from __future__ import annotations

from pathlib import Path


def family_of(pid: int) -> list[int]:
    """A process and everything below it."""
    return [pid, *(one for child in children_of(pid) for one in family_of(child))]


def coordinator_of(pid: int) -> int | None:
    """The coordinator that rank 0, ``pid``, has started; None where there is none."""
    return next(filter(_is_coordinator, children_of(pid)), None)


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in children.read_text().split()]
        except OSError:
            continue
    return found


def _is_coordinator(pid: int) -> bool:
    try:
        return b"coordination.coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
