"""Attention written out by hand, as ``F.scaled_dot_product_attention``.

Known are the usual layouts: linear layers for queries, keys and values, in one or apart, an output
layer, a mask that is a buffer or an argument. What lies between is not read from the code: each
layout that the module may have is proposed, and the comparison finds the right one.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hydroslurm.integrations.fused.rewriters import Forward, NotRewritten, Proposal, add

NAME = "F.scaled_dot_product_attention"
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
    if "eager_attention_forward" in names and _is_eager(module):
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
    masks = [name for name, one in module.named_buffers(recurse=False) if _is_square(one)]
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
        yield Proposal(f"{NAME}({ways})" if ways else NAME, forward)


def _is_eager(module: nn.Module) -> bool:
    """Of transformers' models, which have a fused attention that is chosen by their config."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"


def _is_square(buffer: torch.Tensor) -> bool:
    return buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2]


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
