"""When two results are the same but for rounding.

A gradient may be nothing but rounding (that of a bias of the keys, behind a softmax), so a
difference is measured against the largest value of all outputs, or of all gradients, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hydroslurm.integrations.fused.rewriters import NotRewritten

SAME_FORMULA = 1e-5
"""Of the largest value in a tensor; modules that compute some of it in float32, whatever they are
given, are off by 1e-7, another approximation of GELU by 1e-4."""
_NOTHING_BUT_ROUNDING = 1e-6
"""Of the largest value in all of them."""


@dataclass(frozen=True)
class Result:
    """What a forward and its backward have made.

    Attributes:
        outputs: tensors. rest: other parts of the output. gradients: of inputs and weights.
        rng: the state of the random numbers after the forward.
    """

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    rest: list[Any]
    rng: torch.Tensor

    def pairs(self, other: Result) -> Iterator[tuple[torch.Tensor, torch.Tensor, float]]:
        """Each tensor with the other's, and the largest value of all tensors of its kind."""
        for mine, theirs in (self.outputs, other.outputs), (self.gradients, other.gradients):
            both = [
                (a, b)
                for a, b in zip(mine, theirs, strict=True)
                if a is not None and b is not None and a.numel() and not a.is_complex()
            ]
            top = max((largest(a) for a, _ in both), default=0.0)
            yield from ((a, b, top) for a, b in both)

    def difference(self, other: Result) -> float:
        """The largest, relative to the largest value."""
        return max((_off(a, b) / (top or 1.0) for a, b, top in self.pairs(other)), default=0.0)


def require_same_kind(wanted: Result, seen: Result) -> None:
    """The same number of tensors, their types, all that is no tensor, and the random numbers.

    Raises:
        NotRewritten: something of it is not.
    """
    if [_kind(one) for one in wanted.outputs] != [_kind(one) for one in seen.outputs]:
        raise NotRewritten(
            f"its output is {', '.join(map(_kind, wanted.outputs))}, the fused one's "
            f"{', '.join(map(_kind, seen.outputs))}"
        )
    if wanted.rest != seen.rest:
        raise NotRewritten("its output has other parts")
    if not torch.equal(wanted.rng, seen.rng):
        raise NotRewritten("the fused one draws other random numbers")
    if [one is None for one in wanted.gradients] != [one is None for one in seen.gradients]:
        raise NotRewritten("another gradient is missing")


def require_same_formula(wanted: Result, seen: Result) -> None:
    """The same in double precision.

    Raises:
        NotRewritten: it is not.
    """
    require_same_kind(wanted, seen)
    for want, have, top in wanted.pairs(seen):
        allowed = SAME_FORMULA * largest(want) + _NOTHING_BUT_ROUNDING * top
        if not torch.allclose(want, have, rtol=0.0, atol=allowed, equal_nan=True):
            raise NotRewritten(f"another result: differs by {_off(want, have) / (top or 1):.1g}")


def require_as_exact(wanted: Result, seen: Result, exact: Result) -> None:
    """In the user's precision about as near to the exact result as the module is.

    Raises:
        NotRewritten: it is not.
    """
    require_same_kind(wanted, seen)
    exact_of = {id(want): right for want, right, _ in wanted.pairs(exact)}
    for want, have, top in wanted.pairs(seen):
        right = exact_of[id(want)]
        if not want.is_floating_point():
            continue
        eps = torch.finfo(want.dtype).eps
        own, new = _off(want, right), _off(have, right)
        if new > 4 * own + eps * (8 * largest(right) + 2 * top):
            raise NotRewritten(
                f"less exact in {want.dtype}: off by {new:.1g}, where the module is by {own:.1g}"
            )


def largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    return tensor.detach().double().abs().nan_to_num(posinf=0.0).max().item()


def relative(want: torch.Tensor, have: torch.Tensor) -> float:
    """Their difference, relative to the largest value."""
    return _off(want, have) / (largest(want) or 1.0)


def _off(want: torch.Tensor, have: torch.Tensor) -> float:
    return largest(want.double() - have.double())


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
