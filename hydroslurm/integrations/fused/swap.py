"""A module with another forward: the same object, with its weights, hooks, names and mode.

Its class is replaced by one made from it that bears its name, so that ``isinstance``, wrapping
policies that go by the class, and other people's changes of ``__class__`` (FSDP2) work as before.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hydroslurm.integrations.fused.rewriters import Proposal

_KEY = "_hydroslurm_fused"
_PLAIN = (bool, int, float, str, type(None))


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
        if type(value) in _PLAIN and name != "training" and not name.startswith("_is_full")
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
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_kind(one) for one in value)
    return object()  # like no other


def put(module: nn.Module, fused: Fused) -> None:
    """Have the module use this forward."""
    vars(module)[_KEY] = fused
    own: Any = type(module)
    module.__class__ = _class_for(own)


def take_out(module: nn.Module) -> None:
    """Have it use its own again."""
    del vars(module)[_KEY]
    module.__class__ = type(module).__mro__[2]


def fused_in(module: nn.Module) -> Fused | None:
    found: Fused | None = vars(module).get(_KEY)
    return found


class _Swapped:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        fused: Fused = self.__dict__[_KEY]
        if fused.fits(self, args, kwargs):  # type: ignore[arg-type]
            return fused.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle or a copy is the module as it was, and needs no hydroslurm to be read."""
        reduced = list(super().__reduce_ex__(protocol))
        made = type(self)
        own = made.__mro__[2]
        if reduced[0] is copyreg.__newobj__ and len(reduced[1]) == 1:  # type: ignore[attr-defined]
            # pickle wants that one to be called with the object's own class
            reduced[:2] = [copyreg._reconstructor, (own, object, None)]  # type: ignore[attr-defined]
        reduced[1] = tuple(own if one is made else one for one in reduced[1])
        if len(reduced) > 2 and isinstance(reduced[2], dict):
            reduced[2] = {name: value for name, value in reduced[2].items() if name != _KEY}
        return tuple(reduced)


@functools.cache
def _class_for(own: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    made: type[nn.Module] = type(own.__name__, (_Swapped, own), names)
    return made
