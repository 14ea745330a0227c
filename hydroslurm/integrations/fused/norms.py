"""RMSNorm and LayerNorm written out by hand, and PyTorch's RMSNorm where that is not fused (CPU).

Which eps, and whether the weight is added to one, is not read from the code: each that the module
has or names is proposed, and the comparison finds the right one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from hydroslurm.integrations.fused.rewriters import NotRewritten, Proposal, add

_MOST_EPS = 0.1
_BIASES = ("bias", "beta", "shift")


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
            yield Proposal(f"F.rms_norm({of})", _functional(names[0], eps, one_plus))
            yield Proposal(f"rms_norm({of}), one node", _one_node(names[0], eps, one_plus))
    for eps in eps_s:
        if eps is not None:
            yield Proposal(f"F.layer_norm({eps:g})", _layer_norm(names, eps))


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


def _functional(name: str, eps: float | None, one_plus: bool) -> Any:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = _weight(module, name, one_plus)
        return F.rms_norm(x, weight.shape, weight, eps)

    return forward


def _one_node(name: str, eps: float | None, one_plus: bool) -> Any:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight = _weight(module, name, one_plus)
        if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
            raise NotRewritten(f"{x.dtype} with a weight of {weight.dtype}")
        used = torch.finfo(x.dtype).eps if eps is None else eps
        normed: torch.Tensor = _RMSNorm.apply(x, weight, used)  # type: ignore[no-untyped-call]
        return normed

    return forward


def _layer_norm(names: list[str], eps: float) -> Any:
    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight, bias = getattr(module, names[0]), getattr(module, names[-1])
        return F.layer_norm(x, weight.shape, weight, bias if len(names) == 2 else None, eps)

    return forward


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
