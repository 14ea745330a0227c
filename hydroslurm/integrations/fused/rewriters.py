"""What may take the place of a module's ``forward``: a list that users add to, with the norms, the
activations and the attention that people write out by hand.

Which eps a norm has, whether its weight is added to one, and what lies between the layers of an
attention, is not read from the code: each that may be is proposed, and the comparison finds the
right one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or len(names) not in (1, 2):
        return
    parameters = [module.get_parameter(name) for name in names]
    if any(one.dim() != 1 or one.shape != parameters[0].shape for one in parameters):
        return
    if [*module.children(), *module.buffers()]:
        return
    names.sort(key=lambda name: any(word in name.lower() for word in _BIASES))
    for eps in _eps_of(module):
        for one_plus in (False, True) if len(names) == 1 else ():
            of = f"{eps:g}{', 1 + weight' if one_plus else ''}"
            yield Proposal(f"F.rms_norm({of})", partial(_rms_norm, names[0], eps, one_plus))
        yield Proposal(f"F.layer_norm({eps:g})", partial(_layer_norm, names, eps))


def _eps_of(module: nn.Module) -> Sequence[float]:
    """What may be the eps: an attribute, or a number in the code of a method."""
    attributes = [value for value in vars(module).values() if type(value) is float]
    methods = [one for one in vars(type(module)).values() if hasattr(one, "__code__")]
    constants = [one for method in methods for one in method.__code__.co_consts]
    numbers = [one for one in (*attributes, *constants) if type(one) is float]
    return list({one: None for one in numbers if 0 < one < _MOST_EPS})[:3]


def _rms_norm(
    name: str, eps: float, one_plus: bool, module: nn.Module, x: torch.Tensor
) -> torch.Tensor:
    weight: torch.Tensor = getattr(module, name)
    return F.rms_norm(x, weight.shape, 1 + weight if one_plus else weight, eps)


def _layer_norm(names: list[str], eps: float, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight, bias = getattr(module, names[0]), getattr(module, names[-1])
    return F.layer_norm(x, weight.shape, weight, bias if len(names) == 2 else None, eps)


# --- attention
# ------------------------------------------------------------------------------------------------

_ATTENTION = "F.scaled_dot_product_attention"
_TOGETHER = ("qkv", "c_attn", "to_qkv", "in_proj", "Wqkv", "query_key_value")
_APART = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("W_query", "W_key", "W_value"),
)
_OUTPUT = ("proj", "c_proj", "o_proj", "out_proj", "to_out", "wo", "dense", "out")
_HEADS = ("n_head", "n_heads", "num_heads", "heads", "nhead", "num_attention_heads")
_MADE_IN_FORWARD = {"tril", "triu", "masked_fill", "masked_fill_", "where"}
_HELPERS = (nn.Dropout, nn.Softmax, nn.Identity)


@add
def attention(module: nn.Module) -> Iterator[Proposal]:
    """Of a module of the user's with a softmax, linear layers by the usual names, and no more."""
    if isinstance(module, nn.MultiheadAttention):
        raise NotRewritten("it is fused where it is called with need_weights=False")
    methods = inspect.getmembers(type(module), inspect.isfunction)
    names = {
        name
        for known_as, method in methods
        if known_as != "__init__" and getattr(nn.Module, known_as, None) is not method
        for name in inspect.unwrap(method).__code__.co_names
    }
    if type(module).__module__.startswith("torch."):
        return
    config = getattr(module, "config", None)  # of transformers' models, which say so there
    if (
        "eager_attention_forward" in names
        and getattr(config, "_attn_implementation", None) == "eager"
    ):
        raise NotRewritten(
            "it returns what its softmax makes; model.set_attn_implementation('sdpa') is fused"
        )
    children = dict(module.named_children())
    if "softmax" not in names and not any(isinstance(c, nn.Softmax) for c in children.values()):
        return
    layers = {name for name, child in children.items() if not isinstance(child, _HELPERS)}
    output = next((name for name in _OUTPUT if name in layers), None)
    inputs = next((one for one in ((n,) for n in _TOGETHER) if one[0] in layers), None) or next(
        (three for three in _APART if layers.issuperset(three)), ()
    )
    heads = next((name for name in _HEADS if type(vars(module).get(name)) is int), None)
    masks = [
        name
        for name, one in module.named_buffers(recurse=False)
        if one.dim() >= 2 and one.shape[-1] == one.shape[-2]
    ]
    is_known = inputs and heads and layers == {*inputs, *([output] if output else [])}
    has_more = len(list(module.parameters(recurse=False))) or len(list(module.buffers())) > 1
    if not is_known or has_more or (not masks and names & _MADE_IN_FORWARD):
        raise NotRewritten("its layers are not laid out, or not named, in one of the known ways")
    if any(_has_hooks(child) for child in children.values() if isinstance(child, _HELPERS)):
        raise NotRewritten("its softmax or dropout has hooks")
    assert heads is not None
    dropouts = [name for name, one in children.items() if isinstance(one, nn.Dropout) and one.p]
    kinds = ("kept", "hidden", "added") if masks else ("",)
    layouts = ("", "by heads") if len(inputs) == 1 else ("",)
    for kind, layout in itertools.product(kinds, layouts):
        ways = ", ".join(filter(None, (kind and f"mask {kind}", layout)))
        mask = (masks[0], kind) if masks else None
        forward = _forward(inputs, output, heads, mask, layout, dropouts)
        yield Proposal(f"{_ATTENTION}({ways})" if ways else _ATTENTION, forward)


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(kinds) or bool(module._backward_pre_hooks)


def _forward(
    inputs: tuple[str, ...],
    output: str | None,
    heads: str,
    mask: tuple[str, str] | None,
    layout: str,
    dropouts: list[str],
) -> Forward:
    """A forward by the names of layers, of the buffer that is the mask, and of the dropouts."""

    def forward(module: nn.Module, x: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        count, length = getattr(module, heads), x.shape[1]
        made = [getattr(module, name)(x) for name in inputs]
        if layout:
            made = list(made[0].unflatten(-1, (count, 3, -1)).unbind(-2))
        else:
            whole = made[0].chunk(3, dim=-1) if len(made) == 1 else made
            made = [one.unflatten(-1, (count, -1)) for one in whole]
        query, key, value = (one.transpose(1, 2) for one in made)
        extra = [one for one in (*given, *named.values()) if one is not None]
        if mask is not None:
            buffer = getattr(module, mask[0])[..., :length, :length]
            extra.append(buffer if mask[1] == "added" else (buffer != 0) == (mask[1] == "kept"))
        if len(extra) > 1 or not all(isinstance(one, torch.Tensor) for one in extra):
            raise NotRewritten("it has more than one mask, or other arguments")
        shown = extra[0] if extra else None
        if shown is not None and shown.dtype is not torch.bool:  # it is added
            shown = shown.to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, shown)
        out: torch.Tensor = attended.transpose(1, 2).flatten(2)
        out = getattr(module, output)(out) if output else out
        for name in dropouts:
            out = getattr(module, name)(out)
        return out

    return forward
