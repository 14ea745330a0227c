"""What may take the place of a module's ``forward``: a list that users add to, with the norms and
the activations that people write out by hand.

Which eps a norm has, and whether its weight is added to one, is not read from the code: each eps
that the module has or names is proposed, and the comparison finds the right one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hydroslurm.errors import UsageError

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F.gelu(approximate='tanh')": partial(F.gelu, approximate="tanh"),
    "F.gelu": F.gelu,
    "F.silu": F.silu,
    "F.mish": F.mish,
    "F.softplus": F.softplus,
    "F.hardswish": F.hardswish,
    "F.logsigmoid": F.logsigmoid,
}
_MOST_EPS = 0.1
_BIASES = ("bias", "beta", "shift")

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


@add
def activation(module: nn.Module) -> Iterator[Proposal]:
    """Of a module of the user's that has neither weights nor modules."""
    if type(module).__module__.startswith("torch.") or any(True for _ in module.children()):
        return
    if not [*module.parameters(), *module.buffers()]:
        for name, function in _ACTIVATIONS.items():
            yield Proposal(name, partial(_activation, function))


def _activation(function: Callable[[torch.Tensor], Any], _: nn.Module, x: torch.Tensor) -> Any:
    return function(x)


@add
def norm(module: nn.Module) -> Iterator[Proposal]:
    """Of a module with nothing but one weight for each place of the last dimension, or with a bias
    as well, and with an eps."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if type(module) is nn.LayerNorm or len(names) not in (1, 2):
        return
    parameters = [module.get_parameter(name) for name in names]
    if any(one.dim() != 1 or one.shape != parameters[0].shape for one in parameters):
        return
    if [*module.children(), *module.buffers()]:
        return
    names.sort(key=lambda name: any(word in name.lower() for word in _BIASES))
    eps_s = _eps_of(module)
    if len(names) == 1:
        for eps, one_plus in itertools.product(eps_s, (False, True)):
            of = f"{'eps' if eps is None else f'{eps:g}'}{', 1 + weight' if one_plus else ''}"
            yield Proposal(f"F.rms_norm({of})", partial(_functional, names[0], eps, one_plus))
            yield Proposal(f"rms_norm({of}), one node", partial(_one_node, names[0], eps, one_plus))
    for eps in eps_s:
        if eps is not None:
            yield Proposal(f"F.layer_norm({eps:g})", partial(_layer_norm, names, eps))


def _eps_of(module: nn.Module) -> Sequence[float | None]:
    """What may be the eps: an attribute, or a number in the code of a method; None is PyTorch's,
    which goes by the type of the input."""
    if type(module) is nn.RMSNorm and module.eps is None:
        return [None]
    attributes = [value for value in vars(module).values() if type(value) is float]
    methods = [one for one in vars(type(module)).values() if hasattr(one, "__code__")]
    constants = [one for method in methods for one in method.__code__.co_consts]
    numbers = [one for one in (*attributes, *constants) if type(one) is float]
    return list({one: None for one in numbers if 0 < one < _MOST_EPS})[:3]


def _weight(module: nn.Module, name: str, one_plus: bool) -> torch.Tensor:
    weight: torch.Tensor = getattr(module, name)
    return 1 + weight if one_plus else weight


def _functional(
    name: str, eps: float | None, one_plus: bool, module: nn.Module, x: torch.Tensor
) -> torch.Tensor:
    weight = _weight(module, name, one_plus)
    return F.rms_norm(x, weight.shape, weight, eps)


def _one_node(
    name: str, eps: float | None, one_plus: bool, module: nn.Module, x: torch.Tensor
) -> torch.Tensor:
    weight = _weight(module, name, one_plus)
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        raise NotRewritten(f"{x.dtype} with a weight of {weight.dtype}")
    used = torch.finfo(x.dtype).eps if eps is None else eps
    return _RMSNorm.apply(x, weight, used)  # type: ignore[no-any-return, no-untyped-call]


def _layer_norm(names: list[str], eps: float, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight, bias = getattr(module, names[0]), getattr(module, names[-1])
    return F.layer_norm(x, weight.shape, weight, bias if len(names) == 2 else None, eps)


class _RMSNorm(torch.autograd.Function):
    """PyTorch's has a kernel on CUDA; on a CPU it is a chain of operators, each of which reads and
    writes all of its input, and so is its backward. Here the sums are products with a vector."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed: torch.Tensor = (x * scale).mul_(weight)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        rows, of_rows = x.reshape(-1, width), gradient.reshape(-1, width)
        scales = scale.reshape(-1)
        product = of_rows * rows
        of_weight = product.t().mv(scales)
        along = product.mv(weight).mul_(scales.pow(3)).div_(-width)
        of_x = torch.mul(of_rows, weight, out=product).mul_(scales.unsqueeze(1))
        of_x.addcmul_(rows, along.unsqueeze(1))
        return of_x.view_as(x), of_weight, None
