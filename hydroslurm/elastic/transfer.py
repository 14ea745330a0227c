"""The state of a run from a rank that has it to those that need it, over their process group.

The tree of the state travels as JSON and its tensors as bytes, in pieces; nothing is unpickled.
What arrived is compared with the digest of what was sent before any of it is used.
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
"""Of one message: what is lost by waiting for the digest, and host memory beside the state."""
MOST_HEADER_BYTES = 256 << 20
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8


def hand_over(
    state: Mapping[str, Any] | None, *, source: int, needs: Collection[int], rank: int
) -> Mapping[str, Any] | None:
    """Send the state from ``source`` to the ranks in ``needs``; all others return at once.

    With one receiver the source sends to it; with more it is a broadcast, in which all take part.

    Args:
        state: of the source; not looked at elsewhere.
        rank: this one.

    Returns:
        What was sent, on the ranks that need it; its tensors are on the CPU. Else None.

    Raises:
        RanksError: what arrived is not what was sent.
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
    """A small state as bytes, with their digest; :func:`unpack` reads them."""
    header, tensors = _described(state)
    body = b"".join([header, *(_bytes(one).numpy().tobytes() for one in tensors)])
    digest = hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    return torch.frombuffer(bytearray(digest + length + body), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Mapping[str, Any]:
    """What was packed.

    Raises:
        RanksError: these are other bytes.
    """
    seen = data.numpy().tobytes()
    begin = _DIGEST_BYTES + _LENGTH_BYTES
    body = seen[begin:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != seen[:_DIGEST_BYTES]:
        raise RanksError("the state of a rank arrived with other bytes than were sent")
    at = int.from_bytes(seen[_DIGEST_BYTES:begin], "little")
    document = parse_json(body[:at], max_depth=1000)
    tensors = {key: _empty(dtype, shape) for key, dtype, shape in document["tensors"]}
    _fill([_bytes(one) for one in tensors.values()], data[begin + at :])
    found: Mapping[str, Any] = decode(document["tree"], tensors)
    return found


def _described(state: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    """The tree of a state with its tensors' names, types and shapes, as JSON; and these tensors on
    the CPU."""
    encoded, tensors = encode(dict(state), prefix="state")
    listed = [(key, tensor.detach().contiguous().cpu()) for key, tensor in tensors.items()]
    described = [
        [key, str(one.dtype).removeprefix("torch."), list(one.shape)] for key, one in listed
    ]
    header = json.dumps({"tree": encoded, "tensors": described}).encode()
    return header, [one for _, one in listed]


class _Link:
    """From the source to one rank, or to all."""

    def __init__(self, source: int, to_one: int | None, rank: int) -> None:
        self._source = source
        self._to_one = to_one
        self._is_source = rank == source
        kind = "cuda" if "gloo" not in str(dist.get_backend_config()) else "cpu"
        self._device = torch.device(kind)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, as the source has it."""
        there = tensor.to(self._device)
        if self._to_one is None:
            dist.broadcast(there, src=self._source)
        elif self._is_source:
            dist.send(there, dst=self._to_one)
        else:
            dist.recv(there, src=self._source)
        return there if self._device.type == "cpu" else there.cpu()


def _send(state: Mapping[str, Any] | None, link: _Link) -> None:
    assert state is not None
    header, tensors = _described(state)
    link.move(torch.tensor([len(header)], dtype=torch.int64))
    link.move(torch.frombuffer(bytearray(header), dtype=torch.uint8))
    digest = hashlib.blake2b(header, digest_size=_DIGEST_BYTES)
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for parts in _pieces([_bytes(one) for one in tensors]):
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
    for parts in _pieces([_bytes(one) for one in tensors.values()]):
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
    """The bytes of tensors in their order, cut into pieces of one size; of each piece its parts in
    these tensors."""
    parts: list[torch.Tensor] = []
    room = PIECE_BYTES
    for one in flat:
        while one.numel():
            parts.append(one[:room])
            room, one = room - parts[-1].numel(), one[room:]
            if not room:
                yield parts
                parts, room = [], PIECE_BYTES
    if parts:
        yield parts


def _fill(parts: list[torch.Tensor], data: torch.Tensor) -> None:
    for part, one in zip(parts, torch.split(data, [part.numel() for part in parts]), strict=True):
        part.copy_(one)


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
