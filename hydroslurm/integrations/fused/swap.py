"""A module with another forward: the same object, with its weights, hooks, names and mode."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydroslurm.integrations.fused.rewriters import Proposal

PLAIN = (bool, int, float, str, type(None))


class Fused:
    """A proposal in its place, and what it was compared for. Whatever differs from that (another
    dtype, one more argument, a setting of the module changed) is left to the module's own forward.

    Args:
        like: the kind of call that it was compared for, as text, which a file can have.
    """

    def __init__(self, module: nn.Module, proposal: Proposal, like: str) -> None:
        self.name = proposal.name
        self.forward = proposal.forward
        self._like = like
        self._kind: tuple[Any, ...] | None = None
        self._settings = settings(module)

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        own = module.__dict__
        for name, value in self._settings:
            if own.get(name, self) != value:
                return False
        kind = kind_of(args, kwargs)
        if self._kind is None and repr(kind) == self._like:
            self._kind = kind
        return kind == self._kind


def settings(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module, by which its forward may go, but for its mode."""
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if type(value) in PLAIN and name != "training" and not name.startswith("_is_full")
    )


def kind_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a call has in common with others for which the same forward is right."""
    first = next((one for one in args if isinstance(one, torch.Tensor)), None)
    autocast = first is not None and torch.is_autocast_enabled(first.device.type)
    named = tuple((name, _kind(value)) for name, value in sorted(kwargs.items()))
    return (autocast, *[_kind(value) for value in args], named)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device.type, value.dim()
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_kind(one) for one in value)
    return object()  # like no other


def put(module: nn.Module, fused: Fused) -> None:
    """Have the module use this forward. A copy of it does, too; a pickle names the method alone,
    which is that of the class where it is read."""
    own = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if fused.fits(self, args, kwargs):
            return fused.forward(self, *args, **kwargs)
        return own(self, *args, **kwargs)

    forward.fused = fused  # type: ignore[attr-defined]
    module.forward = types.MethodType(forward, module)


def fused_in(module: nn.Module) -> Fused | None:
    found: Fused | None = getattr(vars(module).get("forward"), "fused", None)
    return found
