"""The threads of a rank that reduce its buckets while the backward goes on.

A bucket is cut into pieces, which follow each other through the slots of the node's memory:

    bring    each rank copies its piece into the slot                     then posts ARRIVED
    sum      each rank adds one slice of all ranks' pieces                then posts SUMMED
    exchange the first rank exchanges the node's sum with other nodes,
    gather   and gathers what the nodes have added                        then posts READY
    take     each rank copies the result into its bucket                  then posts TAKEN

One thread brings and sums, one takes, and the first rank has one more for each of the other two, so
that the next piece is sent while one is on its way back. All ranks number their pieces alike, as
DDP gives every rank the same buckets in the same order. A rank brings a piece only once all have
taken the slot's last one, so that no post is mistaken for that of another piece.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from hydroslurm.core.awake_clock import AwakeClock
from hydroslurm.core.threads import thread
from hydroslurm.errors import ReductionFailed
from hydroslurm.parallel.node_memory import ARRIVED, READY, SUMMED, TAKEN, NodeMemory
from hydroslurm.parallel.nodes import Network, Nodes, add, copy

_LOOK_S = 0.1
"""How often a rank that waits looks whether its peers live."""
_ALIGN = 64
"""Elements: slices of two ranks do not meet in one cache line."""


@dataclass(frozen=True)
class Arithmetic:
    """In what types gradients are added and sent.

    Attributes:
        accumulate: the type of the sums; None: float32, and float64 for gradients of float64.
        wire: what travels between nodes; None: the gradients' own type.
        piece_elements: how many elements a piece has.
    """

    accumulate: torch.dtype | None
    wire: torch.dtype | None
    piece_elements: int

    def sums(self, kind: torch.dtype) -> torch.dtype:
        return self.accumulate or (kind if kind is torch.float64 else torch.float32)

    def sent(self, kind: torch.dtype) -> torch.dtype:
        return self.wire or kind


class CudaCopies:
    """Between a GPU's memory and the node's, which is pinned for that: on two streams of their own,
    one for each direction."""

    def __init__(self, memory: NodeMemory, device: torch.device) -> None:
        self._device = device
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = runtime.cudaHostRegister(memory.address, memory.layout.size_bytes, 0)
        if int(error) not in (0, 712):  # 712: registered already, by another model's copies
            torch.cuda.check_error(int(error))
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        """What the thread of the backward has launched up to here."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def down(self, host: torch.Tensor, bucket: torch.Tensor, begun: Any) -> None:
        self._down.wait_event(begun)
        with torch.cuda.stream(self._down):
            host.copy_(bucket, non_blocking=True)
        self._down.synchronize()

    def up(self, bucket: torch.Tensor, host: torch.Tensor) -> None:
        with torch.cuda.stream(self._up):  # a conversion is the GPU's
            bucket.copy_(host.to(self._device, non_blocking=True))
        self._up.synchronize()


@dataclass(eq=False)
class Job:
    """One bucket under way.

    Attributes:
        finish: called once, with the reason of a failure or an empty text.
        copies: for a bucket in a GPU's memory, with the event after which it is complete.
    """

    bucket: torch.Tensor
    finish: Callable[[str], None]
    copies: CudaCopies | None = None
    begun: Any = None


@dataclass(frozen=True)
class Piece:
    """A part of a job's bucket, which is a view; pieces are numbered from 0."""

    job: Job
    part: torch.Tensor
    number: int
    slot: int
    is_last: bool


class Reduction:
    """Reduces buckets in the order in which they are given, in the background."""

    def __init__(
        self,
        memory: NodeMemory,
        nodes: Nodes,
        network: Network | None,
        *,
        arithmetic: Arithmetic,
        timeout_s: float,
        exempt: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """``exempt``: a block whose operators no pause holds: what is under way is finished."""
        self.issued = 0
        self._memory, self._nodes, self._network = memory, nodes, network
        self._arithmetic, self._timeout_s, self._exempt = arithmetic, timeout_s, exempt
        self._scale = 1.0 / sum(len(members) for members in nodes.members)
        self._local_ranks, self._slots = range(len(nodes.mine)), memory.layout.slots
        # a rank may end as soon as it has taken the last piece, for which it needs its own post
        self._own_last = sorted(self._local_ranks, key=nodes.local_rank.__eq__)
        self._is_only_node = len(nodes.members) == 1
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
        self._memory.close()

    # --- the threads

    def _start(self, name: str, loop: Callable[[], None]) -> None:
        def run() -> None:
            try:
                loop()
            except Exception as error:
                self._fail(error)

        thread(run, name=f"hydroslurm-{name}").start()

    def _each(self, pieces: queue.SimpleQueue[Piece | None], act: Callable[[Piece], None]) -> None:
        while (piece := pieces.get()) is not None:
            with self._exempt():
                act(piece)

    def _bring_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._exempt():
                parts = torch.split(job.bucket, self._arithmetic.piece_elements)
            for part in parts:
                slot, is_last = self._number % self._slots, part is parts[-1]
                piece = Piece(job, part, self._number, slot, is_last)
                self._number += 1
                with self._exempt():
                    self._bring(piece)
                    self._sum(piece)
                if self._network is not None:
                    self._to_exchange.put(piece)
                self._to_take.put(piece)

    def _bring(self, piece: Piece) -> None:
        if piece.number >= self._slots:
            self._wait(TAKEN, piece, posts=len(self._local_ranks))
        own, job = self._nodes.local_rank, piece.job
        area, part = self._area(piece, own), piece.part
        if job.copies is not None:
            job.copies.down(area, part, job.begun)
        else:  # this rank's own slice is added where it is
            mine = self._slice(piece)
            copy(area[: mine.start], part[: mine.start])
            copy(area[mine.stop :], part[mine.stop :])
        self._memory.note_entered(own, piece.number + 1)
        self._memory.post(piece.slot, ARRIVED, self._local_ranks)

    def _sum(self, piece: Piece) -> None:
        self._wait(ARRIVED, piece, posts=len(self._local_ranks))
        sources = [self._area(piece, rank) for rank in self._local_ranks]
        if piece.job.copies is None:
            sources[self._nodes.local_rank] = piece.part
        out, mine = self._area(piece, self._memory.layout.node_sum), self._slice(piece)
        add(
            out[mine.start : mine.stop],
            [one[mine.start : mine.stop] for one in sources],
            accumulate=self._arithmetic.sums(piece.part.dtype),
            scale=self._scale,
        )
        waiting = self._own_last if self._is_only_node else (0,)
        self._memory.post(piece.slot, SUMMED, waiting)

    def _exchange(self, piece: Piece) -> None:
        assert self._network is not None
        self._wait(SUMMED, piece, posts=len(self._local_ranks))
        kind, count, types = piece.part.dtype, len(piece.part), self._arithmetic
        with _of_the_network():
            self._network.add(piece.slot, count, types.sent(kind), types.sums(kind))
        self._to_gather.put(piece)

    def _gather(self, piece: Piece) -> None:
        assert self._network is not None
        kind = self._arithmetic.sent(piece.part.dtype)
        with _of_the_network():
            self._network.gather(piece.slot, len(piece.part), kind)
        self._memory.post(piece.slot, READY, self._own_last)

    def _take(self, piece: Piece) -> None:
        layout, job = self._memory.layout, piece.job
        if self._is_only_node:
            self._wait(SUMMED, piece, posts=len(self._local_ranks))
            found = self._area(piece, layout.node_sum)
        else:
            self._wait(READY, piece, posts=1)
            found = self._area(piece, layout.result)
        if job.copies is not None:
            job.copies.up(piece.part, found)
        else:
            copy(piece.part, found)
        self._memory.post(piece.slot, TAKEN, self._local_ranks)
        if piece.is_last:
            self._finish(job, "")

    # --- inside

    def _area(self, piece: Piece, which: int) -> torch.Tensor:
        """A piece as a rank has brought it, or its sum. Within one node no sum is rounded for the
        wire."""
        kind = piece.part.dtype
        if which not in self._local_ranks and not self._is_only_node:
            kind = self._arithmetic.sent(kind)
        return self._memory.piece(piece.slot, which, len(piece.part), kind)

    def _slice(self, piece: Piece) -> range:
        """The elements of a piece that this rank adds."""
        count = len(piece.part)
        each = -(-count // (len(self._local_ranks) * _ALIGN)) * _ALIGN
        start = min(count, self._nodes.local_rank * each)
        return range(start, min(count, start + each))

    def _wait(self, which: int, piece: Piece, *, posts: int) -> None:
        """Until so many posts have come to this rank.

        Raises:
            ReductionFailed: a rank has died or failed, or the time-out has passed.
        """
        memory, own = self._memory, self._nodes.local_rank
        clock = AwakeClock()
        deadline_s = clock.now_s() + self._timeout_s
        for _ in range(posts):
            while not memory.wait(piece.slot, which, own, limit_s=_LOOK_S):
                failure = self._failure_here()
                if failure and memory.wait(piece.slot, which, own, limit_s=0.0):
                    break  # posted meanwhile, by a rank that has ended after the last step
                if failure:
                    raise ReductionFailed(failure)
                if clock.now_s() > deadline_s:
                    raise ReductionFailed(self._late(piece))

    def _failure_here(self) -> str:
        """What is wrong with a rank of this node, if anything."""
        if reason := self._memory.read_failure():
            return reason
        if not (dead := self._memory.dead()):
            return ""
        ranks = ", ".join(str(self._nodes.mine[local]) for local in dead)
        return f"rank {ranks} ended while gradients were being reduced on its node"

    def _late(self, piece: Piece) -> str:
        missing = [self._nodes.mine[local] for local in self._memory.behind(piece.number + 1)]
        who = f"ranks {missing} have" if missing else "another node has"
        return (
            f"{who} not brought their gradients within the process group's time-out of "
            f"{self._timeout_s:g} s. Do all ranks call backward equally often?"
        )

    def _finish(self, job: Job, failure: str) -> None:
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
        self._memory.write_failure(str(error))
        for job in unfinished:
            self._finish(job, str(self._failure))
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
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
