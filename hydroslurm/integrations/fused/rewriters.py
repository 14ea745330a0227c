"""What may take the place of a module's ``forward``: a list that users add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from hydroslurm.errors import UsageError

Forward = Callable[..., Any]
"""Called with the module, and with what its own ``forward`` is called with."""


@dataclass(frozen=True)
class Proposal:
    """A forward that may be equal to a module's own, by its name in the table."""

    name: str
    forward: Forward


class NotRewritten(Exception):
    """Why a module that looks like one of those that are rewritten keeps its own forward."""


Rewriter = Callable[[nn.Module], Iterable[Proposal]]
"""Raises NotRewritten; proposes nothing for a module that is not of its kind."""

_rewriters: list[Rewriter] = []


def register_rewriter(
    wanted: type[nn.Module] | Callable[[nn.Module], bool], *, name: str = ""
) -> Callable[[Forward], Forward]:
    """Offer a forward for modules of a class, or for those that a function picks. A decorator.

        @hydroslurm.register_rewriter(CausalSelfAttention)
        def by_sdpa(self, x):
            q, k, v = self.qkv(x)
            return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))

    It is compared and timed like those that come with hydroslurm, and has to read whatever it
    needs from the module at each call.

    Args:
        wanted: the class; a class made from it counts if it has the same ``forward``.
        name: in the table; that of the function by default.

    Raises:
        UsageError: neither a class of modules nor a function.
    """
    if not callable(wanted) or (isinstance(wanted, type) and not issubclass(wanted, nn.Module)):
        raise UsageError(
            f"register_rewriter({wanted!r}): wanted a class of nn.Module, or a function that "
            "returns whether a module is one of those"
        )
    picks = _of_class(wanted) if isinstance(wanted, type) else wanted

    def register(forward: Forward) -> Forward:
        proposal = Proposal(name or forward.__name__, forward)
        add(lambda module: (proposal,) if picks(module) else ())
        return forward

    return register


def _of_class(kind: type[nn.Module]) -> Callable[[nn.Module], bool]:
    own = kind.forward
    return lambda module: isinstance(module, kind) and type(module).forward is own


def add(rewriter: Rewriter) -> Rewriter:
    """For those that make a forward for each module."""
    _rewriters.append(rewriter)
    return rewriter


def proposals_for(module: nn.Module) -> list[Proposal]:
    """All that may take the place of this module's forward.

    Raises:
        NotRewritten: nothing may, although it is of a known kind.
    """
    return [proposal for rewriter in _rewriters for proposal in rewriter(module)]


def first_line(error: BaseException) -> str:
    """An error of PyTorch's as a reason in a table."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:120]
