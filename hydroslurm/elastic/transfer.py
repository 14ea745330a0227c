"""Transfers a run's state over the process group, from a rank that has it to those that need it.

The state's tree travels as JSON and its tensors as bytes, in pieces; nothing is unpickled. The
receiver compares the sender's digest before it uses any of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.core.files import parse_json
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
