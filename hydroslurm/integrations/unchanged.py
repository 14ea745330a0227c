"""Whether tensors are as they were."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Unchanged:
    """Remembers the tensors of a nested state: where they are, and how often they were written to.

    Tensors made in inference mode have no version, and are left out.
    """

    def __init__(self, tree: Any) -> None:
        self._tensors = [(one, one.data_ptr(), one._version) for one in _tensors_of(tree)]

    def holds(self) -> bool:
        """Whether nobody has written to one of them since, or put another memory in its place."""
        return all(
            (tensor.data_ptr(), tensor._version) == (pointer, version)
            for tensor, pointer, version in self._tensors
        )


def _tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        if not tree.is_inference():
            yield tree
    elif isinstance(tree, Mapping):
        for one in tree.values():
            yield from _tensors_of(one)
    elif isinstance(tree, (list, tuple)):
        for one in tree:
            yield from _tensors_of(one)
