"""The nodes of a process group: which ranks share one, and how their first ranks exchange sums.

One rank of each node sends, over gloo, and adds what the others have sent. Each piece is split
evenly over the nodes. Each of them gets its part from all others, adds them in the order of the
nodes in the accumulation type, and sends the sum back to all: 2 (n - 1) / n of a piece leaves each
of n nodes, which no algorithm undercuts. Every rank gets the same bytes, and the sum of an element
does not depend on its place in a bucket, unlike that of a ring.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hydroslurm.core.proc import boot_id
from hydroslurm.parallel.node_memory import NodeMemory

_Gloo: Any = dist.ProcessGroupGloo  # of its methods torch's types know no names
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Nodes:
    """All ranks by node, and this one's place.

    Attributes:
        members: of each node the ranks, in order; the first one speaks for it.
        node: this rank's.
        local_rank: its place in it.
    """

    members: tuple[tuple[int, ...], ...]
    node: int
    local_rank: int

    @property
    def mine(self) -> tuple[int, ...]:
        return self.members[self.node]


def here(environ: Mapping[str, str]) -> str:
    """The name of this rank's node: the same on all ranks that are to share memory, and on no
    others. The launcher's number of the node may divide a machine further."""
    number = environ.get("GROUP_RANK") or environ.get("SLURM_NODEID") or ""  # torchrun's is closer
    space = ""
    with contextlib.suppress(OSError):  # memory is handed over through a socket of this network
        space = str(Path("/proc/self/ns/net").readlink())
    return f"{boot_id()} {space} {number}"


def group(names: Sequence[str], rank: int) -> Nodes:
    """All ranks by node, in the order of their first ranks.

    Args:
        names: of each rank's node, by rank.
        rank: this one.
    """
    nodes: dict[str, list[int]] = {}
    for other, name in enumerate(names):
        nodes.setdefault(name, []).append(other)
    node = list(nodes).index(names[rank])
    return Nodes(tuple(map(tuple, nodes.values())), node, nodes[names[rank]].index(rank))


class Network:
    """The connections of one node's first rank with those of the other nodes."""

    def __init__(
        self, memory: NodeMemory, *, store: Any, node: int, nodes: int, timeout: timedelta
    ) -> None:
        """Connect; all first ranks call this at once.

        Raises:
            RuntimeError: gloo cannot connect them.
        """
        self.node, self.nodes = node, nodes
        self._memory = memory
        # Backends of our own: no groups of torch.distributed, so that the other ranks have no part.
        # Two, for a piece may be on its way out while another one of its slot's number comes back.
        self._scatters, self._gathers = (
            _Gloo(distributed_c10d.PrefixStore(name, store), node, nodes, timeout)
            for name in ("scatter", "gather")
        )
        self._received = torch.empty(memory.layout.area_bytes, dtype=torch.uint8, device="cpu")

    def add(self, slot: int, count: int, kind: torch.dtype, accumulate: torch.dtype) -> None:
        """Add this node's part of a piece, of ``count`` elements of ``kind``, from all nodes' sums,
        into its place in the slot's result.

        Raises:
            RuntimeError: a connection broke, or the time-out passed.
        """
        sums = self._parts(slot, self._memory.layout.node_sum, count, kind)
        each = len(sums[self.node])
        received = torch.split(self._received[: each * self.nodes * kind.itemsize].view(kind), each)
        works = []
        for other in self._others():
            works.append(self._scatters.recv([received[other]], other, slot))
            works.append(self._scatters.send([sums[other]], other, slot))
        for work in works:
            work.wait()
        parts = [*received[: self.node], sums[self.node], *received[self.node + 1 :]]
        result = self._parts(slot, self._memory.layout.result, count, kind)
        add(result[self.node], parts, accumulate=accumulate)

    def gather(self, slot: int, count: int, kind: torch.dtype) -> None:
        """Bring the parts of all nodes together as the slot's result.

        Raises:
            RuntimeError: as for :meth:`add`.
        """
        result = self._parts(slot, self._memory.layout.result, count, kind)
        works = []
        for other in self._others():
            works.append(self._gathers.recv([result[other]], other, slot))
            works.append(self._gathers.send([result[self.node]], other, slot))
        for work in works:
            work.wait()

    def abort(self) -> None:
        """Have the other nodes notice that this one has failed, where torch can do that."""
        for gloo in (self._scatters, self._gathers):
            if (abort := getattr(gloo, "abort", None)) is not None:
                abort()

    def _others(self) -> list[int]:
        """The other nodes, each one's nearest first: not all begin with the same."""
        return [(self.node + step) % self.nodes for step in range(1, self.nodes)]

    def _parts(
        self, slot: int, which: int, count: int, kind: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """What each node adds of a piece; the last part may end behind the piece."""
        each = -(-count // self.nodes)
        return torch.split(self._memory.piece(slot, which, each * self.nodes, kind), each)


# --- sums and copies in host memory
# ------------------------------------------------------------------------------------------------


def add(
    out: torch.Tensor,
    sources: Sequence[torch.Tensor],
    *,
    accumulate: torch.dtype,
    scale: float = 1.0,
) -> None:
    """``out = scale * sum of the sources``; all of one length.

    Element by element, in the order of the sources and in the accumulation type, rounded once: the
    result of an element depends neither on its place nor on the processor.
    """
    block = _block()
    for to, first, *rest in zip(*(torch.split(one, block) for one in (out, *sources)), strict=True):
        total = to if to.dtype is accumulate else torch.empty_like(to, dtype=accumulate)
        if rest and first.dtype is accumulate:
            torch.add(first, rest.pop(0), out=total)
        else:
            total.copy_(first)
        for one in rest:
            total += one
        if scale != 1.0:
            total *= scale
        if total is not to:
            to.copy_(total)


def copy(out: torch.Tensor, source: torch.Tensor) -> None:
    """Of one length; converted where the types differ."""
    if out.dtype is source.dtype:
        ctypes.memmove(out.data_ptr(), source.data_ptr(), source.nbytes)
        return
    for to, one in zip(*(torch.split(one, _block()) for one in (out, source)), strict=True):
        to.copy_(one)


def _block() -> int:
    """Elements of a block: the most for which PyTorch takes no further thread, for those are the
    training's. More is faster, as far as the caches hold it."""
    return 1 << 17 if torch.get_num_threads() == 1 else 1 << 15
