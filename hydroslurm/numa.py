"""Keep a rank on the cores next to its device: :func:`bind`.

Memory follows: by default Linux takes a thread's memory from the node that the thread runs on.
``torch.numa`` (torch 2.9 and newer) is for launchers: in a rank it would initialise CUDA, after
which workers cannot be forked, and it needs a GPU, numactl and private names of torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.coordination.world import World
from hydroslurm.core.threads import say

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Binding:
    """What was bound: NUMA nodes in order (none: nothing was changed), the processors that the rank
    may use now, and the line that was printed."""

    rank: int
    local_rank: int
    nodes: tuple[int, ...]
    cpus: frozenset[int]
    message: str


bindings: list[Binding] = []
"""Those of this process, for the events of the run."""
observers: list[Callable[[Binding], None]] = []
"""Called with each later one."""


def bind(
    *, device: str | None = None, environ: Mapping[str, str] | None = None, sysfs: Path = SYSFS
) -> Binding:
    """Put this process on the cores of the NUMA node of its device.

        hydroslurm.numa.bind()      # first thing in each rank, before it allocates anything

    Without a device, or where the kernel does not know its node, the ranks of this machine share
    its nodes evenly. Never outside of what Slurm's cpuset allows. All threads of the process are
    moved; memory that exists stays where it is. One line on stderr says what was done, or why
    nothing was, and the event ``numa_bound`` of the run.

    Args:
        device: a PCI address such as ``0000:3b:00.0``. Default: that of this rank's GPU.
        environ, sysfs: instead of ``os.environ`` and ``/sys``.

    Raises:
        UsageError: RANK and the like contradict each other.
    """
    environ = os.environ if environ is None else environ
    world = World.from_environ(environ)
    found = read_nodes(os.sched_getaffinity(0), sysfs=sysfs)
    nodes: tuple[int, ...] = ()
    message = "not bound: the kernel describes no NUMA nodes here"
    if any(found.values()):
        pci = device or pci_of_rank(world.local_rank, environ)
        nodes, why = choose(
            found,
            local_rank=world.local_rank,
            local_world_size=world.local_world_size,
            device=pci,
            node=node_of_device(pci, sysfs=sysfs) if pci else None,
            has_own_cores=has_own_cores(environ),
        )
        cpus = frozenset[int]().union(*(found[node] for node in nodes))
        where = f"NUMA node{'s' * (len(nodes) > 1)} {format_list(nodes)}, cores {format_list(cpus)}"
        message = f"bound to {where} ({why})"
        try:
            _move_threads(cpus)
        except OSError as error:
            nodes, message = (), f"not bound to {where}: sched_setaffinity: {error.strerror}"
    cpus = frozenset(os.sched_getaffinity(0))
    binding = Binding(world.rank, world.local_rank, nodes, cpus, message)
    bindings.append(binding)
    say(f"rank {world.rank} {message}")
    for observer in observers:
        observer(binding)
    return binding


def choose(
    nodes: Mapping[int, frozenset[int]],
    *,
    local_rank: int,
    local_world_size: int,
    device: str | None = None,
    node: int | None = None,
    has_own_cores: bool = False,
) -> tuple[tuple[int, ...], str]:
    """Which of these nodes a rank gets, and why, for a sentence. Pure.

    Args:
        nodes: as :func:`read_nodes` returns them; at least one has a processor.
        device, node: the PCI address of its GPU, and that device's node; None when unknown.
        has_own_cores: its processors are not those of its neighbours, which leaves nothing to
            share out.
    """
    if device is None:
        why = "no device"
    elif node is None:
        why = f"the kernel does not know the node of its device {device}"
    elif nodes.get(node):
        return (node,), f"that of its device {device}"
    else:
        why = (
            f"its device {device} is on node {node}, where Slurm's cpuset allows no core "
            "(srun --gres-flags=enforce-binding, or more --cpus-per-gpu, gives cores there)"
        )
    usable = tuple(sorted(node for node, cpus in nodes.items() if cpus))
    if local_world_size <= 1:
        return usable, f"{why}; it is alone on this machine"
    if has_own_cores:
        return usable, f"{why}; its own cores stay as they are"
    local_rank %= local_world_size  # neighbours in rank are neighbours in place
    first = local_rank * len(usable) // local_world_size
    last = max(first + 1, (local_rank + 1) * len(usable) // local_world_size)
    return usable[first:last], f"{why}; local rank {local_rank} of {local_world_size}"


def has_own_cores(environ: Mapping[str, str]) -> bool:
    """Whether srun gave each task of this node its own cores (``--cpu-bind``, task/affinity)."""
    kind, masks = environ.get("SLURM_CPU_BIND_TYPE", ""), environ.get("SLURM_CPU_BIND_LIST", "")
    return kind.startswith(("mask_cpu", "map_cpu")) and len(set(masks.split(","))) > 1


def read_nodes(allowed: Iterable[int], *, sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """Each NUMA node that has processors -> those of them that are allowed."""
    allowed, nodes = frozenset(allowed), {}
    for folder in sysfs.glob("devices/system/node/node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if cpus := parse_list((folder / "cpulist").read_text()):
                nodes[int(folder.name.removeprefix("node"))] = cpus & allowed
    return nodes


def node_of_device(pci: str, *, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device; None where the kernel does not know (virtual machines have
    -1) or has no such device."""
    with contextlib.suppress(OSError, ValueError):
        node = int((sysfs / "bus/pci/devices" / pci / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def parse_list(text: str) -> frozenset[int]:
    """The numbers of the kernel's ``0-3,8,10-11``; ValueError where it is no such list."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(n for a, _, b in ranges for n in range(int(a), int(b or a) + 1))


def format_list(numbers: Iterable[int]) -> str:
    """The opposite of :func:`parse_list`."""
    ordered = enumerate(sorted(numbers))
    ranges = (list(run) for _, run in itertools.groupby(ordered, lambda pair: pair[1] - pair[0]))
    return ",".join(f"{r[0][1]}-{r[-1][1]}" if r[1:] else str(r[0][1]) for r in ranges)


def pci_of_rank(local_rank: int, environ: Mapping[str, str]) -> str | None:
    """The PCI address of the visible GPU of this local number, or of the only visible one; None
    without one. NVIDIA's management library is asked, and not CUDA: a process that has initialised
    CUDA cannot fork workers that use it. Not tested on a GPU."""
    name = str(local_rank)
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = visible.split(",")
        name = names[0] if len(names) == 1 else "".join(names[local_rank : local_rank + 1])
    try:
        library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
    except OSError:
        return None
    if not name or library.nvmlInit_v2() != 0:
        return None
    if name.isdecimal():
        error = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        error = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    info = ctypes.create_string_buffer(68)  # nvmlPciInfo_t, in which "00000000:3B:00.0" is at 36
    error = error or library.nvmlDeviceGetPciInfo_v3(handle, info)
    library.nvmlShutdown()
    return None if error else info.raw[40:].split(b"\0")[0].decode().lower()


def _move_threads(cpus: frozenset[int]) -> None:
    os.sched_setaffinity(0, cpus)
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(int(thread), cpus)
