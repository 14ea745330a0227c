"""Copies of per-rank state on another rank, so that a spare takes over with the same numbers:
random numbers, position in the data, and what was registered per rank.

After each step a rank sends its own state to the rank one member further, and receives that of the
one before, while the next step is computed. This is replication to a peer's memory (buddy
checkpointing), but of some 16 KB: every rank has the weights and optimizer anyway. A leaving rank
need do nothing, so most SIGKILLs are as harmless as SIGTERM; only what was not sent yet is missing.
A copy counts only for the same rank, world size, step and epoch at which the others go on.

Rank r *keeps* the state of rank r - d, with d ranks per member, so no member keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hydroslurm.elastic.roster import Form
from hydroslurm.elastic.transfer import hand_over, pack, unpack

TAG = 0x6873
"""Tag of the messages, apart from the script's own."""
ARRIVES_S = 1.0
"""Longest wait for a lost rank's last message, which it sent before the step began."""
LARGE_BYTES = 1 << 20
"""Per-step state that earns a warning; with nothing registered it has some 16 KB."""
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class _Kept:
    of_rank: int
    world_size: int
    data: torch.Tensor


class PeerReplicas:
    """One rank's copies. All ranks of a generation call :meth:`begin`, and then :meth:`exchange`
    after each complete step."""

    def __init__(self, *, tell: Callable[[str], None] = lambda _: None) -> None:
        """``tell``: warns the user, once each, of a large or incomplete copy."""
        self._tell = tell
        self._told: set[str] = set()
        self._rank = self._world_size = self._distance = 0
        self._capacity = 0
        self._works: list[Any] = []
        self._sent: torch.Tensor | None = None
        self._arriving: torch.Tensor | None = None
        self._kept: _Kept | None = None

    def begin(self, form: Form, own: Mapping[str, Any]) -> None:
        """Start in a new generation; ``own``: this rank's initial state.

        Raises:
            RuntimeError: a rank is gone.
        """
        self._kept, self._works, self._capacity = None, [], 0
        if not _is_possible(form):
            return
        self._rank, self._world_size = form.rank, form.world_size
        self._distance = _distance(form)
        own_bytes = pack(own).numel()
        if own_bytes > LARGE_BYTES:
            self._say_once(
                "large",
                f"{own_bytes:,} bytes of this rank's own state are sent to another rank after "
                f"each step, so that a spare can go on with it; most is {_largest(own)}. Register "
                "less with per_rank=True (what is the same on all ranks belongs into extra=), or "
                "leave `spares` out of the spec",
            )
        longest = torch.tensor([own_bytes], dtype=torch.int64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        # positions gain digits later; a state that outgrows this is no longer sent
        self._capacity = int(longest) * 5 // 4 + 4096
        self.exchange(own)

    def exchange(self, own: Mapping[str, Any]) -> None:
        """Send this rank's state and receive the one it keeps, without waiting. A lost rank is no
        error here: the training's next collective finds it."""
        if not self._capacity or not self._has_arrived():
            return
        data = pack(own)
        room = torch.zeros(_LENGTH_BYTES + self._capacity, dtype=torch.uint8)
        if data.numel() <= self._capacity:
            room[:_LENGTH_BYTES] = _as_bytes(data.numel())
            room[_LENGTH_BYTES : _LENGTH_BYTES + data.numel()] = data
        else:
            self._say_once(
                "outgrown",
                f"this rank's own state has grown to {data.numel():,} bytes, of which "
                f"{self._capacity:,} can be sent until members change again; until then a spare "
                f"would not have it. Most is {_largest(own)}",
            )
        self._sent, self._arriving = room, torch.empty_like(room)
        to = (self._rank + self._distance) % self._world_size
        try:
            self._works = [
                dist.irecv(self._arriving, src=self._keeps, tag=TAG),
                dist.isend(room, dst=to, tag=TAG),
            ]
        except (RuntimeError, ValueError):
            self._works, self._capacity = [], 0

    def settle(self, form: Form) -> None:
        """Receive a replaced rank's last state before the old group ends."""
        if self._works and not form.fresh and self._keeps in form.needs:
            self._has_arrived(within_s=ARRIVES_S)
        self._works, self._capacity = [], 0

    def hand_over(self, form: Form) -> Mapping[str, Any] | None:
        """Send the replaced ranks their predecessors' states, in the new group. All ranks of the
        generation call this.

        Returns:
            The state of this rank's predecessor, if a rank kept it.

        Raises:
            RanksError: received bytes differ from those sent.
            RuntimeError: a rank is gone.
        """
        if form.fresh or not _is_possible(form):
            return None
        got = None
        for rank, keeper in _pairs(form):
            kept = self._copy_of(rank, form.world_size) if form.rank == keeper else None
            got = hand_over({"own": kept}, source=keeper, needs=[rank], rank=form.rank) or got
        return None if got is None else got["own"]

    def _say_once(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._tell(message)

    @property
    def _keeps(self) -> int:
        return (self._rank - self._distance) % self._world_size

    def _copy_of(self, rank: int, world_size: int) -> Mapping[str, Any] | None:
        kept = self._kept
        if kept is None or (kept.of_rank, kept.world_size) != (rank, world_size):
            return None
        return unpack(kept.data)

    def _has_arrived(self, *, within_s: float | None = None) -> bool:
        """Wait for the pending messages; return whether all have come."""
        works, self._works = self._works, []
        try:
            for work in works:  # the receive comes first: it counts even if the send fails
                work.wait() if within_s is None else work.wait(timedelta(seconds=within_s))
                if work is works[0]:
                    self._keep()
        except (RuntimeError, ValueError):
            self._capacity = 0
            return False
        return True

    def _keep(self) -> None:
        assert self._arriving is not None
        length = int(self._arriving[:_LENGTH_BYTES].view(torch.int64))
        data = self._arriving[_LENGTH_BYTES : _LENGTH_BYTES + length]
        self._kept = _Kept(self._keeps, self._world_size, data) if length else None


def _is_possible(form: Form) -> bool:
    """gloo only: it sends from host memory, with tags."""
    return _distance(form) < form.world_size and "gloo" in str(dist.get_backend_config())


def _distance(form: Form) -> int:
    return -(-form.world_size // form.members)


def _pairs(form: Form) -> Iterator[tuple[int, int]]:
    """Yield ranks that need a state, each with its keeper; none where both are new."""
    for rank in form.needs:
        keeper = (rank + _distance(form)) % form.world_size
        if keeper not in form.needs:
            yield rank, keeper


def _largest(own: Mapping[str, Any]) -> str:
    """Return the largest part of a state, by its registered name."""
    registered = {f"registered {name!r}": v for name, v in own.get("registered", {}).items()}
    parts = {"the position in the data": own.get("data"), **registered}
    sizes = {name: pack({"": value}).numel() for name, value in parts.items()}
    name = max(sizes, key=sizes.__getitem__)
    return f"{name} ({sizes[name]:,} bytes)"


def _as_bytes(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int64).view(torch.uint8)
