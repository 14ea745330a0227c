"""Which NUMA nodes a rank gets, and putting it there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.coordination.world import World
from hydroslurm.errors import UsageError
from hydroslurm.numa.devices import pci_of_rank
from hydroslurm.numa.memory import POLICIES, Policy, set_policy
from hydroslurm.numa.topology import (
    STATUS,
    SYSFS,
    Topology,
    format_list,
    node_of_device,
    read_topology,
)

_NO_CUT = "its own cores stay as they are"


@dataclass(frozen=True)
class Place:
    """Where a rank is to be.

    Attributes:
        nodes: NUMA nodes, in order.
        cpus: processors, all of which it may use.
        why: for a sentence: "that of its device 0000:3b:00.0".
    """

    nodes: tuple[int, ...]
    cpus: frozenset[int]
    why: str


@dataclass(frozen=True)
class Binding:
    """What was bound.

    Attributes:
        rank, local_rank: whose binding it is.
        place: None: nothing was changed.
        memory: the policy that is in force.
        message: the line that was printed.
    """

    rank: int
    local_rank: int
    place: Place | None
    memory: Policy
    message: str

    @property
    def data(self) -> dict[str, object]:
        """Of the event ``numa_bound``."""
        place = self.place
        return {
            "local_rank": self.local_rank,
            "nodes": list(place.nodes) if place else [],
            "cpus": format_list(place.cpus) if place else None,
            "memory": self.memory,
            "message": self.message,
        }


bindings: list[Binding] = []
"""Those of this process, for whoever keeps its events."""
observers: list[Callable[[Binding], None]] = []
"""Called with each later one."""


def bind(
    *,
    device: str | None = None,
    memory: Policy = "preferred",
    environ: Mapping[str, str] | None = None,
    sysfs: Path = SYSFS,
    status: Path = STATUS,
) -> Binding:
    """Put this process on the cores and the memory of the NUMA node of its device.

        hydroslurm.numa.bind()      # first thing in each rank, before it allocates anything

    Without a device, or where the kernel does not know its node, the ranks of this machine share
    its nodes evenly. Never outside of what Slurm's cpuset allows. One line on stderr says what was
    done, and the event ``numa_bound`` of the run.

    All threads of the process are moved; the memory policy is that of the calling thread and of
    those that it starts from now on. Memory that exists stays where it is.

    Args:
        device: a PCI address such as ``0000:3b:00.0``. Default: the GPU of this rank, which is the
            visible one of its local number.
        memory: ``preferred``: of these nodes while they have some; ``strict``: of no others, so
            that the rank is killed when they are full; ``none``: as it was.
        environ: instead of ``os.environ``.
        sysfs, status: where to read instead of ``/sys`` and ``/proc/self/status``.

    Returns:
        What was bound. Where the machine describes no nodes or a container forbids it, nothing is
        changed, and its message says why.

    Raises:
        UsageError: ``memory`` is none of these, or RANK and the like contradict each other.
    """
    if memory not in POLICIES:
        raise UsageError(f"memory={memory!r}; wanted one of {', '.join(POLICIES)}")
    environ = os.environ if environ is None else environ
    world = World.from_environ(environ)
    topology = read_topology(os.sched_getaffinity(0), sysfs=sysfs, status=status)
    if topology is None:
        why = "the kernel describes no NUMA nodes here"
        return _tell(Binding(world.rank, world.local_rank, None, "none", f"not bound: {why}"))
    pci = device or pci_of_rank(world.local_rank, environ)
    node = node_of_device(pci, sysfs=sysfs) if pci else None
    place = choose(
        topology,
        local_rank=world.local_rank,
        local_world_size=world.local_world_size,
        device=pci,
        node=node,
        has_own_cores=has_own_cores(environ),
    )
    return _tell(_bind(world, topology, place, memory))


def choose(
    topology: Topology,
    *,
    local_rank: int,
    local_world_size: int,
    device: str | None = None,
    node: int | None = None,
    has_own_cores: bool = False,
) -> Place:
    """Where a rank is to be. Pure.

    Args:
        device: the PCI address of its GPU.
        node: that device's NUMA node; None when unknown.
        has_own_cores: the processors that it may use are not those of its neighbours, so that there
            is nothing to share out.
    """
    if device and node is not None:
        if topology.nodes.get(node):
            return Place((node,), topology.nodes[node], f"that of its device {device}")
        if topology.usable:
            apart = (
                f"its device {device} is on node {node}, where Slurm's cpuset allows no core "
                "(srun --gres-flags=enforce-binding, or more --cpus-per-gpu, gives cores there)"
            )
            return _share(topology, local_rank, local_world_size, has_own_cores, apart)
    unknown = f"the kernel does not know the node of its device {device}" if device else "no device"
    return _share(topology, local_rank, local_world_size, has_own_cores, unknown)


def has_own_cores(environ: Mapping[str, str]) -> bool:
    """Whether srun gave each task of this node cores of its own (``--cpu-bind`` and the default of
    task/affinity)."""
    kind, masks = environ.get("SLURM_CPU_BIND_TYPE", ""), environ.get("SLURM_CPU_BIND_LIST", "")
    return kind.startswith(("mask_cpu", "map_cpu")) and len(set(masks.split(","))) > 1


def _share(topology: Topology, local_rank: int, ranks: int, has_own_cores: bool, why: str) -> Place:
    """The nodes are shared out evenly: neighbours in rank are neighbours in place."""
    nodes = topology.usable
    if has_own_cores or ranks <= 1:
        chosen, how = nodes, _NO_CUT if ranks > 1 else "it is alone on this machine"
    else:
        local_rank %= ranks
        first = local_rank * len(nodes) // ranks
        last = max(first + 1, (local_rank + 1) * len(nodes) // ranks)
        chosen, how = nodes[first:last], f"local rank {local_rank} of {ranks}"
    cpus = frozenset[int]().union(*(topology.nodes[node] for node in chosen))
    return Place(tuple(chosen), cpus, f"{why}; {how}")


def _bind(world: World, topology: Topology, place: Place, memory: Policy) -> Binding:
    refused = _move_threads(place.cpus)
    if refused:
        text = f"not bound to cores {format_list(place.cpus)}: {refused}"
        return Binding(world.rank, world.local_rank, None, "none", text)
    nodes = [node for node in place.nodes if node in topology.memory]
    problem = None if nodes else "Slurm's cpuset allows no memory there"
    problem = problem or set_policy(nodes, memory)
    in_force: Policy = "none" if problem else memory
    where = f"NUMA node{'s' * (len(place.nodes) > 1)} {format_list(place.nodes)}"
    text = f"bound to {where}, cores {format_list(place.cpus)} ({place.why}); "
    if problem:
        text += f"its memory is not bound: {problem}"
    else:
        text += "memory as it was" if memory == "none" else f"memory {memory} from there"
    return Binding(world.rank, world.local_rank, place, in_force, text)


def _move_threads(cpus: Iterable[int]) -> str | None:
    """Set the affinity of all threads; why not, in words."""
    chosen: Sequence[int] = sorted(cpus)
    try:
        os.sched_setaffinity(0, chosen)
    except OSError as error:
        return f"sched_setaffinity: {error.strerror}"
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), chosen)
    return None


def _tell(binding: Binding) -> Binding:
    bindings.append(binding)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr closed, or None
        sys.stderr.write(f"hydroslurm: rank {binding.rank} {binding.message}\n")
        sys.stderr.flush()
    for observer in observers:
        observer(binding)
    return binding
