"""Between nodes: one rank of each node sends, over gloo, and adds what the others have sent.

Each piece is split evenly over the nodes. Each of them gets its part from all others, adds them in
the order of the nodes in the accumulation type, and sends the sum back to all: 2 (n - 1) / n of a
piece leaves each of n nodes, which no algorithm undercuts. Every rank gets the same bytes, and the
sum of an element does not depend on its place in a bucket, unlike that of a ring.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hydroslurm.parallel.library import Library
from hydroslurm.parallel.segment import Segment

_Gloo: Any = dist.ProcessGroupGloo  # of its methods torch's types know no names


class Network:
    """The connections of one node's first rank with those of the other nodes."""

    def __init__(
        self,
        library: Library,
        segment: Segment,
        *,
        store: Any,
        node: int,
        nodes: int,
        timeout: timedelta,
    ) -> None:
        """Connect; all first ranks call this at once.

        Raises:
            RuntimeError: gloo cannot connect them.
        """
        self.node, self.nodes = node, nodes
        self._library = library
        self._segment = segment
        # Backends of our own: no groups of torch.distributed, so that the other ranks have no part.
        # Two, for a piece may be on its way out while another one of its slot's number comes back.
        self._scatters, self._gathers = (
            _Gloo(distributed_c10d.PrefixStore(name, store), node, nodes, timeout)
            for name in ("scatter", "gather")
        )
        self._received = torch.empty(segment.layout.area_bytes, dtype=torch.uint8)

    def add(self, slot: int, count: int, kind: torch.dtype, accumulate: torch.dtype) -> None:
        """Add this node's part of a piece, of ``count`` elements of ``kind``, from all nodes' sums,
        into its place in the slot's result.

        Raises:
            RuntimeError: a connection broke, or the time-out passed.
        """
        layout, part_bytes = self._segment.layout, self._part(count) * kind.itemsize
        sums, result = layout.area(slot, layout.node_sum), layout.area(slot, layout.result)
        parts = [self._received.data_ptr() + node * part_bytes for node in range(self.nodes)]
        parts[self.node] = self._segment.address + sums + self.node * part_bytes
        works = []
        for other in self._others():
            received = self._received[other * part_bytes : (other + 1) * part_bytes]
            works.append(self._scatters.recv([received], other, slot))
            sent = self._bytes(sums + other * part_bytes, part_bytes)
            works.append(self._scatters.send([sent], other, slot))
        for work in works:
            work.wait()
        self._library.sum(
            self._segment.address + result + self.node * part_bytes,
            kind,
            parts,
            kind,
            count=self._part(count),
            accumulate=accumulate,
        )

    def gather(self, slot: int, count: int, kind: torch.dtype) -> None:
        """Bring the parts of all nodes together as the slot's result.

        Raises:
            RuntimeError: as for :meth:`add`.
        """
        layout, part_bytes = self._segment.layout, self._part(count) * kind.itemsize
        result = layout.area(slot, layout.result)
        mine = self._bytes(result + self.node * part_bytes, part_bytes)
        works = []
        for other in self._others():
            theirs = self._bytes(result + other * part_bytes, part_bytes)
            works.append(self._gathers.recv([theirs], other, slot))
            works.append(self._gathers.send([mine], other, slot))
        for work in works:
            work.wait()

    def _others(self) -> list[int]:
        """The other nodes, each one's nearest first: not all begin with the same."""
        return [(self.node + step) % self.nodes for step in range(1, self.nodes)]

    def abort(self) -> None:
        """Have the other nodes notice that this one has failed, where torch can do that."""
        for gloo in (self._scatters, self._gathers):
            if (abort := getattr(gloo, "abort", None)) is not None:
                abort()

    def _part(self, count: int) -> int:
        """Elements of a piece that each node adds; the last part may end behind the piece."""
        return -(-count // self.nodes)

    def _bytes(self, offset: int, count: int) -> torch.Tensor:
        return self._segment.tensor(offset, count, torch.uint8)


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long a collective of this group may take."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = group._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout, timedelta):
                return timeout
    return timedelta(minutes=30)
