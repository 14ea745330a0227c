"""The bytes of tensors, one after the other: all of them, in C order, whatever their sizes."""

from __future__ import annotations

import torch

from hydroslurm.checkpoint.tensor_bytes import SMALL_BYTES, packed


def test_all_bytes_in_order() -> None:
    """Empty, tiny and large ones, views, transposed ones, those with a gradient, every type."""
    tensors = [
        torch.tensor(1.5),
        torch.empty(0, 3),
        torch.arange(7, dtype=torch.int8),
        torch.randn(30, 4).t(),
        torch.randn(100)[10:20],
        torch.nn.Parameter(torch.randn(8)),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        *(torch.randint(0, 255, (SMALL_BYTES,), dtype=torch.uint8) for _ in range(5)),
        torch.randint(0, 255, (SMALL_BYTES + 1,), dtype=torch.uint8),
        torch.randn(700, 500, requires_grad=True).t(),
        torch.zeros(()),
    ]
    wanted = b"".join(
        one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in tensors
    )
    pieces = [bytes(piece) for piece in packed(iter(tensors))]
    assert b"".join(pieces) == wanted
    assert all(pieces)


def test_small_tensors_are_one_piece() -> None:
    """A file is written in few calls, however many tensors it has."""
    tensors = [torch.full((100,), number) for number in range(1000)]
    assert [len(piece) for piece in packed(tensors)] == [1000 * 100 * 8]
