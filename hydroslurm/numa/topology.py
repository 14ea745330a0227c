"""The NUMA nodes of this machine, as the kernel describes them below ``/sys`` and ``/proc``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Topology:
    """What this process may use of its machine.

    Attributes:
        nodes: a node with processors -> those that this process may run on; none where its cpuset
            leaves the node out. Nodes of memory alone (HBM, CXL) are not listed.
        memory: the nodes whose memory this process may use.
    """

    nodes: Mapping[int, frozenset[int]]
    memory: frozenset[int]

    @property
    def usable(self) -> list[int]:
        """The nodes that it may run on, in order."""
        return sorted(node for node, cpus in self.nodes.items() if cpus)


def read_topology(
    allowed: Iterable[int], *, sysfs: Path = SYSFS, status: Path = STATUS
) -> Topology | None:
    """What of this machine a process with these processors may use.

    Args:
        allowed: the processors, as ``os.sched_getaffinity`` gives them.
        sysfs, status: where to read instead of ``/sys`` and ``/proc/self/status``.

    Returns:
        None where the kernel describes no nodes: it was built without NUMA, or ``/sys`` is hidden.
    """
    mine = frozenset(allowed)
    nodes: dict[int, frozenset[int]] = {}
    for folder in sysfs.glob("devices/system/node/node[0-9]*"):
        number = folder.name.removeprefix("node")
        cpus = _numbers_in(folder / "cpulist")
        if number.isdecimal() and cpus:
            nodes[int(number)] = cpus & mine
    if not any(nodes.values()):
        return None
    memory = _allowed_memory(status)
    return Topology(nodes, frozenset(nodes) if memory is None else memory)


def node_of_device(pci: str, *, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device, such as ``0000:3b:00.0``; None where the kernel does not know
    (it says -1, as in most virtual machines) or has no such device."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse_list(text: str) -> frozenset[int]:
    """The numbers of the kernel's ``0-3,8,10-11``; of an empty text none.

    Raises:
        ValueError: it is no such list.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        found |= set(range(int(first), int(last if dash else first) + 1))
    return frozenset(found)


def format_list(numbers: Iterable[int]) -> str:
    """The opposite of :func:`parse_list`; ``none`` of nothing."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in ranges) or "none"


def _numbers_in(file: Path) -> frozenset[int]:
    try:
        return parse_list(file.read_text())
    except (OSError, ValueError):
        return frozenset()


def _allowed_memory(status: Path) -> frozenset[int] | None:
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    text = next(
        (line.partition(":")[2] for line in lines if line.startswith("Mems_allowed_list")), ""
    )
    try:
        return parse_list(text) or None
    except ValueError:
        return None
