"""The threads of a rank that reduce its buckets while the backward goes on.

A bucket is cut into pieces, which follow each other through the slots of the node's memory:

    bring    each rank copies its piece into the slot                     counter ARRIVED
    sum      each rank adds one slice of all ranks' pieces                counter SUMMED
    exchange the first rank exchanges the node's sum with other nodes,
    gather   and gathers what the nodes have added                        counter READY
    take     each rank copies the result into its bucket                  counter TAKEN

One thread brings and sums, one takes, and the first rank has one more for each of the other two, so
that the next piece is sent while one is on its way back. A counter of a slot rises with each of its
uses; all ranks number their pieces alike, as DDP gives every rank the same buckets in the same
order.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from hydroslurm.errors import ReductionFailed
from hydroslurm.parallel.library import Library
from hydroslurm.parallel.network import Network
from hydroslurm.parallel.nodes import Nodes
from hydroslurm.parallel.pieces import Arithmetic, Job, Piece
from hydroslurm.parallel.segment import ARRIVED, READY, SUMMED, TAKEN, Segment

_LOOK_S = 0.1
"""How often a rank that waits looks whether its peers live."""
_ALIGN = 64
"""Elements: slices of two ranks do not meet in one cache line."""


class Reduction:
    """Reduces buckets in the order in which they are given, in the background."""

    def __init__(
        self,
        library: Library,
        segment: Segment,
        nodes: Nodes,
        network: Network | None,
        *,
        arithmetic: Arithmetic,
        timeout_s: float,
        exempt: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``exempt``: a block whose operators no pause holds: what is under way is finished."""
        self.issued = 0
        self._library, self._segment, self._nodes = library, segment, nodes
        self._network, self._arithmetic, self._timeout_s = network, arithmetic, timeout_s
        self._exempt = exempt
        self._scale = 1.0 / sum(len(members) for members in nodes.members)
        self._number = 0
        self._unfinished: list[Job] = []
        self._failure: ReductionFailed | None = None
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._to_exchange: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._to_gather: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._to_take: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._start("reduce", self._bring_all)
        self._start("take", lambda: self._each(self._to_take, self._take))
        if network is not None:
            self._start("exchange", lambda: self._each(self._to_exchange, self._exchange))
            self._start("gather", lambda: self._each(self._to_gather, self._gather))

    @property
    def in_flight(self) -> int:
        """How many buckets are under way."""
        return len(self._unfinished)

    def submit(self, job: Job) -> None:
        """Reduce a bucket, in place.

        Raises:
            ReductionFailed: an earlier one failed; this process cannot reduce any more.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._unfinished.append(job)
            self.issued += 1
        self._jobs.put(job)

    def close(self) -> None:
        """End the threads, and the connections with the other ranks."""
        self._jobs.put(None)
        for pieces in (self._to_exchange, self._to_gather, self._to_take):
            pieces.put(None)
        self._segment.close()

    # --- the threads

    def _start(self, name: str, loop: Callable[[], None]) -> None:
        def run() -> None:
            try:
                loop()
            except Exception as error:
                self._fail(error)

        threading.Thread(target=run, name=f"hydroslurm-{name}", daemon=True).start()

    def _each(self, pieces: queue.SimpleQueue[Piece | None], act: Callable[[Piece], None]) -> None:
        while (piece := pieces.get()) is not None:
            with self._exempt():
                act(piece)

    def _bring_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            total = job.bucket.numel()
            for start in range(0, total, self._arithmetic.piece_elements):
                stop = min(total, start + self._arithmetic.piece_elements)
                piece = Piece(job, start, stop, self._number, stop == total)
                self._number += 1
                with self._exempt():
                    self._bring(piece)
                    self._sum(piece)
                if self._network is not None:
                    self._to_exchange.put(piece)
                self._to_take.put(piece)

    def _bring(self, piece: Piece) -> None:
        slot, use = self._place(piece)
        ranks = len(self._nodes.mine)
        self._wait(slot, TAKEN, ranks * use, piece)
        area = self._segment.layout.area(slot, self._nodes.local_rank)
        job = piece.job
        job.copies.bring(
            job.bucket, job.begun, piece.start, piece.stop, area=area, skip=self._slice(piece)
        )
        self._segment.note_entered(self._nodes.local_rank, piece.number + 1)
        self._count(slot, ARRIVED, ranks * (use + 1))

    def _sum(self, piece: Piece) -> None:
        slot, use = self._place(piece)
        layout, mine = self._segment.layout, self._slice(piece)
        ranks, kind = len(self._nodes.mine), piece.job.bucket.dtype
        self._wait(slot, ARRIVED, ranks * (use + 1), piece)
        starts = [self._segment.address + layout.area(slot, rank) for rank in range(ranks)]
        own, job = self._nodes.local_rank, piece.job
        starts[own] = job.copies.own(job.bucket, piece.start, layout.area(slot, own))
        result, offset = self._kind_of_result(kind), mine.start
        out = self._segment.address + layout.area(slot, layout.node_sum)
        self._library.sum(
            out + offset * result.itemsize,
            result,
            [start + offset * kind.itemsize for start in starts],
            kind,
            count=len(mine),
            accumulate=self._arithmetic.sums(kind),
            scale=self._scale,
        )
        self._count(slot, SUMMED, ranks * (use + 1))

    def _exchange(self, piece: Piece) -> None:
        assert self._network is not None
        slot, use = self._place(piece)
        self._wait(slot, SUMMED, len(self._nodes.mine) * (use + 1), piece)
        kind = piece.job.bucket.dtype
        with _of_the_network():
            self._network.add(
                slot, piece.count, self._arithmetic.sent(kind), self._arithmetic.sums(kind)
            )
        self._to_gather.put(piece)

    def _gather(self, piece: Piece) -> None:
        assert self._network is not None
        slot, use = self._place(piece)
        with _of_the_network():
            kind = piece.job.bucket.dtype
            self._network.gather(slot, piece.count, self._arithmetic.sent(kind))
        self._count(slot, READY, use + 1)

    def _take(self, piece: Piece) -> None:
        slot, use = self._place(piece)
        layout, ranks, job = self._segment.layout, len(self._nodes.mine), piece.job
        if len(self._nodes.members) == 1:
            self._wait(slot, SUMMED, ranks * (use + 1), piece)
            area = layout.area(slot, layout.node_sum)
        else:
            self._wait(slot, READY, use + 1, piece)
            area = layout.area(slot, layout.result)
        kind = self._kind_of_result(job.bucket.dtype)
        job.copies.take(job.bucket, piece.start, piece.stop, area=area, kind=kind)
        self._count(slot, TAKEN, ranks * (use + 1))
        if piece.is_last:
            self._finish(job, None)

    # --- inside

    def _kind_of_result(self, kind: torch.dtype) -> torch.dtype:
        """Within one node nothing is rounded for the wire."""
        return kind if len(self._nodes.members) == 1 else self._arithmetic.sent(kind)

    def _place(self, piece: Piece) -> tuple[int, int]:
        """The slot of a piece, and how often it was used before."""
        use, slot = divmod(piece.number, self._segment.layout.slots)
        return slot, use

    def _slice(self, piece: Piece) -> range:
        """The elements of a piece that this rank adds."""
        ranks = len(self._nodes.mine)
        each = -(-piece.count // (ranks * _ALIGN)) * _ALIGN
        start = min(piece.count, self._nodes.local_rank * each)
        return range(start, min(piece.count, start + each))

    def _count(self, slot: int, which: int, target: int) -> None:
        word = self._segment.address + self._segment.layout.word(slot, which)
        self._library.count(word, target & 0xFFFFFFFF)

    def _wait(self, slot: int, which: int, target: int, piece: Piece) -> None:
        """Until a counter is at its target.

        Raises:
            ReductionFailed: a rank has died or failed, or the time-out has passed.
        """
        segment = self._segment
        word = segment.address + segment.layout.word(slot, which)
        deadline = time.monotonic() + self._timeout_s
        while True:
            with contextlib.suppress(InterruptedError):
                if self._library.wait(
                    word, target & 0xFFFFFFFF, failed=segment.failed, slice_s=_LOOK_S
                ):
                    return
                if dead := segment.dead():
                    ranks = ", ".join(str(self._nodes.mine[local]) for local in dead)
                    raise ReductionFailed(
                        f"rank {ranks} ended while gradients were being reduced on its node"
                    )
                if time.monotonic() > deadline:
                    raise ReductionFailed(self._late(piece))
                continue
            raise ReductionFailed(segment.read_failure() or "another rank of this node failed")

    def _late(self, piece: Piece) -> str:
        missing = [self._nodes.mine[local] for local in self._segment.behind(piece.number + 1)]
        who = f"ranks {missing} have" if missing else "another node has"
        return (
            f"{who} not brought their gradients within the process group's time-out of "
            f"{self._timeout_s:g} s. Do all ranks call backward equally often?"
        )

    def _finish(self, job: Job, failure: ReductionFailed | None) -> None:
        with self._lock:
            if job not in self._unfinished:
                return
            self._unfinished.remove(job)
        job.finish(failure)

    def _fail(self, error: Exception) -> None:
        """Tell the other ranks of this node, and all who wait here."""
        if not isinstance(error, ReductionFailed):
            error = ReductionFailed(f"reducing gradients failed: {_line(error)}")
        with self._lock:
            self._failure = self._failure or error
            unfinished = list(self._unfinished)
        segment = self._segment
        segment.write_failure(str(error))
        self._library.fail(
            segment.failed, 1, words=segment.words, count=segment.layout.words, stride=16
        )
        for job in unfinished:
            self._finish(job, self._failure)
        if self._network is not None:
            self._network.abort()


@contextlib.contextmanager
def _of_the_network() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ReductionFailed(
            f"gradients could not be exchanged between nodes ({_line(error)}). A rank of "
            "another node has probably ended: look at what it said"
        ) from error


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
