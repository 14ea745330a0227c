"""A batch that was fetched ahead is saved as it is, or not at all."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from transformers import BatchEncoding

from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.errors import StateMismatch, UnsavableState
from hydroslurm.integrations.held_loader import MOST_BYTES, is_saved, packed, unpacked


class Named(UserDict):
    """With a name beside its items."""

    def __init__(self, items: Any, name: str = "none") -> None:
        super().__init__(items)
        self.name = name


@pytest.mark.parametrize("kind", [dict, BatchEncoding, Named])
def test_batch_comes_back(kind: type) -> None:
    """Class, order and kinds of the items, and the layout of a tensor, are what they were."""
    image = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    batch = kind({"ids": torch.arange(6).view(2, 3), "image": image, "words": ("a", "b"), "n": 2})
    assert is_saved(batch)
    found = unpacked(decode(*encode(packed(batch), prefix="batch")))
    assert type(found) is kind
    assert list(found) == list(batch)
    assert (found["words"], found["n"]) == (("a", "b"), 2)
    assert torch.equal(found["ids"], batch["ids"])
    assert torch.equal(found["image"], image)
    assert found["image"].stride() == image.stride()


@pytest.mark.parametrize(
    "batch",
    [
        {"meta": object()},
        Named({"ids": torch.zeros(1)}, name="another"),
        {"ids": torch.zeros(1, requires_grad=True)},
        {"ids": torch.zeros(1, device="meta")},
        type("Local", (UserDict,), {})({"ids": torch.zeros(1)}),
    ],
)
def test_what_would_come_back_otherwise_is_refused(batch: Any) -> None:
    """Such batches are fetched again, and so are very large ones."""
    assert not is_saved(torch.empty(MOST_BYTES + 1, dtype=torch.uint8))
    with pytest.raises(UnsavableState, match="batch"):
        packed(batch)
    assert not is_saved(batch)


@pytest.mark.parametrize("name", [["os", "_Environ"], ["no_module", "Thing"], ["os", "system"]])
def test_no_other_class_is_made(name: list[str]) -> None:
    """What a checkpoint names is not called, unless it is a dictionary of this kind."""
    with pytest.raises(StateMismatch, match="does not have"):
        unpacked({"batch": {}, "class": name})
