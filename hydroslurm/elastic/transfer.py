"""Transfers state over the process group: a run's, from a rank that has it to those that need it,
and each rank's own, to a peer that keeps a copy for a spare.

A state's tree travels as JSON and its tensors as bytes, in pieces; nothing is unpickled. The
receiver compares the sender's digest before it uses any of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.core.files import parse_json
from hydroslurm.elastic.roster import Form
from hydroslurm.errors import RanksError

PIECE_BYTES = 32 << 20
"""Of one message, and so of host memory besides the state."""
MOST_HEADER_BYTES = 256 << 20
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


def hand_over(
    state: Mapping[str, Any] | None, *, source: int, needs: Collection[int], rank: int
) -> Mapping[str, Any] | None:
    """Send the state from ``source`` to the ranks in ``needs``; all others return at once.

    With one receiver the source sends to it; with more, all ranks take part in a broadcast.

    Args:
        state: of the source; ignored elsewhere.
        rank: this one.

    Returns:
        On ranks in ``needs`` what was sent, with its tensors on the CPU; else None.

    Raises:
        RanksError: received bytes differ from those sent.
        RuntimeError: a rank is gone.
    """
    if not needs:
        return None
    to_one = next(iter(needs)) if len(needs) == 1 else None
    if to_one is not None and rank not in (source, to_one):
        return None
    link = _Link(source, to_one, rank)
    if rank == source:
        _send(state, link)
        return None
    return _receive(link, wanted=rank in needs)


def pack(state: Mapping[str, Any]) -> torch.Tensor:
    """Return a small state as bytes with their digest; :func:`unpack` reads them."""
    header, tensors = _described(state)
    body = b"".join([header, *(_bytes(tensor).numpy().tobytes() for tensor in tensors)])
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    return torch.frombuffer(bytearray(digest + length + body), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Mapping[str, Any]:
    """Return the packed state.

    Raises:
        RanksError: the digest does not match.
    """
    received = data.numpy().tobytes()
    begin = _DIGEST_BYTES + _LENGTH_BYTES
    body = received[begin:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != received[:_DIGEST_BYTES]:
        raise RanksError("the state of a rank arrived with other bytes than were sent")
    at = int.from_bytes(received[_DIGEST_BYTES:begin], "little")
    document = parse_json(body[:at], max_depth=1000)
    tensors = {key: _empty(dtype, shape) for key, dtype, shape in document["tensors"]}
    _fill([_bytes(tensor) for tensor in tensors.values()], data[begin + at :])
    state: Mapping[str, Any] = decode(document["tree"], tensors)
    return state


def _described(state: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    """Return as JSON the state's tree and its tensors' names, types and shapes; and the tensors
    on the CPU."""
    encoded, tensors = encode(dict(state), prefix="state")
    listed = [(key, tensor.detach().contiguous().cpu()) for key, tensor in tensors.items()]
    described = [[key, str(t.dtype).removeprefix("torch."), list(t.shape)] for key, t in listed]
    header = json.dumps({"tree": encoded, "tensors": described}).encode()
    return header, [tensor for _, tensor in listed]


class _Link:
    """A connection from the source to one rank, or to all."""

    def __init__(self, source: int, to_one: int | None, rank: int) -> None:
        self._source = source
        self._to_one = to_one
        self._is_source = rank == source
        kind = "cuda" if "gloo" not in str(dist.get_backend_config()) else "cpu"
        self._device = torch.device(kind)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the source's tensor."""
        moved = tensor.to(self._device)
        if self._to_one is None:
            dist.broadcast(moved, src=self._source)
        elif self._is_source:
            dist.send(moved, dst=self._to_one)
        else:
            dist.recv(moved, src=self._source)
        return moved if self._device.type == "cpu" else moved.cpu()


def _send(state: Mapping[str, Any] | None, link: _Link) -> None:
    assert state is not None
    header, tensors = _described(state)
    link.move(torch.tensor([len(header)], dtype=torch.int64))
    link.move(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for parts in _pieces([_bytes(tensor) for tensor in tensors]):
        piece = buffer[: sum(part.numel() for part in parts)]
        link.move(torch.cat(parts, out=piece))
        digest.update(piece.numpy().tobytes())
    link.move(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8))


def _receive(link: _Link, *, wanted: bool) -> Mapping[str, Any] | None:
    (length,) = link.move(torch.zeros(1, dtype=torch.int64)).tolist()
    if not 0 < length <= MOST_HEADER_BYTES:
        raise RanksError(f"the state of the run begins with a length of {length}")
    header = link.move(torch.empty(length, dtype=torch.uint8)).numpy().tobytes()
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    document = parse_json(header, max_depth=1000)
    tensors = {key: _empty(dtype, shape) for key, dtype, shape in document["tensors"]}
    for parts in _pieces([_bytes(tensor) for tensor in tensors.values()]):
        count = sum(part.numel() for part in parts)
        arrived = link.move(torch.empty(count, dtype=torch.uint8))
        digest.update(arrived.numpy().tobytes())
        if wanted:
            _fill(parts, arrived)
    seen = link.move(torch.empty(32, dtype=torch.uint8)).numpy().tobytes()
    if seen != digest.digest():
        raise RanksError("the state of the run arrived with other bytes than were sent")
    return decode(document["tree"], tensors) if wanted else None


def _pieces(flat: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Cut the tensors' bytes, in order, into pieces of one size; yield for each piece the parts of
    the tensors it covers."""
    parts: list[torch.Tensor] = []
    room = PIECE_BYTES
    for tensor in flat:
        while tensor.numel():
            parts.append(tensor[:room])
            room, tensor = room - parts[-1].numel(), tensor[room:]
            if not room:
                yield parts
                parts, room = [], PIECE_BYTES
    if parts:
        yield parts


def _fill(parts: list[torch.Tensor], data: torch.Tensor) -> None:
    for part, chunk in zip(parts, torch.split(data, [part.numel() for part in parts]), strict=True):
        part.copy_(chunk)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return (
        tensor.reshape(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0).view(torch.uint8)
    )


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    kind = getattr(torch, str(dtype), None)
    if not isinstance(kind, torch.dtype):
        raise RanksError(f"the state of the run names a type {dtype!r}, which torch does not have")
    return torch.empty(shape, dtype=kind)


# --- copies on a peer: a spare takes over with the same random numbers, position in the data, and
# what was registered per rank

TAG = 0x6873
"""Tag of the messages, apart from the script's own."""
ARRIVES_S = 1.0
"""Longest wait for a lost rank's last message, which it sent before the step began."""
LARGE_BYTES = 1 << 20
"""Per-step state that earns a warning; with nothing registered it has some 16 KB."""


@dataclass(frozen=True)
class _Kept:
    of_rank: int
    world_size: int
    data: torch.Tensor


class PeerReplicas:
    """One rank's copies. All ranks of a generation call :meth:`begin`, and then :meth:`exchange`
    after each complete step.

    A rank sends its own state to the rank one member further, and receives that of the one before,
    while the next step is computed. This is replication to a peer's memory (buddy checkpointing),
    but of some 16 KB: every rank has the weights and optimizer anyway. A leaving rank need do
    nothing, so most SIGKILLs are as harmless as SIGTERM; only what was not sent yet is missing. A
    copy counts only for the same rank, world size, step and epoch at which the others go on.

    Rank r *keeps* the state of rank r - d, with d ranks per member, so no member keeps its own.
    """

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
