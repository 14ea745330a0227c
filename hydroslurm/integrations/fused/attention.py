"""Attention written out by hand, as ``F.scaled_dot_product_attention``.

The module's forward is traced by torch.fx with its submodules as they are. In the graph, a product
with a softmax behind it and another product behind that is replaced, with the scale and the mask
in between. What is made from the graph reads weights and submodules from the module at each call.
"""

from __future__ import annotations

import copy
import inspect
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from hydroslurm.integrations.fused.rewriters import (
    Forward,
    NotRewritten,
    Proposal,
    add,
    first_line,
)

NAME = "F.scaled_dot_product_attention"
_MATMUL = (operator.matmul, torch.matmul, torch.bmm, "matmul", "bmm", "__matmul__")
_SOFTMAX = (F.softmax, torch.softmax, "softmax")
_PLAIN = (bool, int, float, str, type(None))
_CASTS = ("type_as", "to", "float")
_MASKED_FILL = ("masked_fill", "masked_fill_", torch.masked_fill)
_ADD = (operator.add, operator.iadd, torch.add, "add", "add_")
_MUL = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_DIV = (operator.truediv, operator.itruediv, torch.div, "div", "div_")


@add
def attention(module: nn.Module) -> Iterator[Proposal]:
    """Of a module whose own forward names a softmax, or that has one as a submodule."""
    own = type(module).forward
    if own is nn.MultiheadAttention.forward:
        yield Proposal("need_weights=False", _not_of_the_caller)
        return
    code = getattr(inspect.unwrap(own), "__code__", None)
    names = code.co_names if code is not None else ()
    config = getattr(module, "config", None)
    if "eager_attention_forward" in names and _is_eager(config):
        raise NotRewritten(
            "it returns what its softmax makes; model.set_attn_implementation('sdpa') is fused"
        )
    children = list(module.children())
    if type(module).__module__.startswith("torch.") or not (
        "softmax" in names or any(isinstance(one, nn.Softmax) for one in children)
    ):
        return
    if any(_has_hooks(one) for one in children if isinstance(one, (nn.Softmax, nn.Dropout))):
        raise NotRewritten("its softmax or dropout has hooks")
    yield Proposal(NAME, _Attention(own))


def _is_eager(config: Any) -> bool:
    """Of transformers' models, which have a fused attention that is chosen by their config."""
    return getattr(config, "_attn_implementation", None) == "eager"


def _not_of_the_caller(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own attention is fused, but for those who want the weights that it returns too."""
    bound = inspect.signature(nn.MultiheadAttention.forward).bind(module, *args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["need_weights"]:
        raise NotRewritten(
            "it is called with need_weights=True, and returns them; with False it is fused"
        )
    raise NotRewritten("it is fused already")


class _Attention:
    """What was traced of one module, by its mode and by the arguments that are not tensors."""

    def __init__(self, own: Forward) -> None:
        self._signature = inspect.signature(own)
        self._traced: dict[tuple[Any, ...], Forward] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = list(bound.arguments.items())[1:]
        plain = {name: value for name, value in given if type(value) in _PLAIN}
        key = (module.training, *plain.items())
        if key not in self._traced:
            self._traced[key] = _traced(module, plain)
        return self._traced[key](module, *args, **kwargs)


def _traced(module: nn.Module, plain: dict[str, Any]) -> Forward:
    """The forward in the module's mode, with these arguments.

    Raises:
        NotRewritten: it cannot be traced, there is no attention in it, or one that has dropout.
    """
    try:
        traced = copy.deepcopy(module)
        before = dict(vars(traced))
        graph = _Tracer().trace(traced, concrete_args=plain)
    except Exception as error:
        raise NotRewritten(f"torch.fx cannot trace it: {first_line(error)}") from error
    if any(before.get(name, before) is not value for name, value in vars(traced).items()):
        raise NotRewritten("its forward sets attributes, or makes a tensor of plain numbers")
    softmaxes = [node for node in graph.nodes if _is_softmax(traced, node)]
    for node in softmaxes:
        _replace(traced, graph, node)
    if not softmaxes:
        raise NotRewritten("no attention was found in it")
    _erase_unused(graph)
    graph.lint()
    made = graph.python_code("self")
    namespace: dict[str, Any] = dict(made.globals)
    exec(compile(made.src, f"<{type(module).__name__} with {NAME}>", "exec"), namespace)
    forward: Forward = namespace["forward"]
    return forward


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # sliced by the length of the input, which is a proxy, too

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del m, module_qualified_name
        return True

    def iter(self, obj: Any) -> Iterator[Any]:
        """``map(heads, qkv.chunk(3, dim=-1))``: the number of pieces is there to be read. Along
        another dimension there may be fewer in the next batch."""
        node = obj.node
        if node.target in ("chunk", torch.chunk):
            given = {
                **dict(zip(("input", "chunks", "dim"), node.args, strict=False)),
                **node.kwargs,
            }
            if isinstance(given["chunks"], int) and given.get("dim") == -1:
                return iter([obj[number] for number in range(given["chunks"])])
        return super().iter(obj)


def _erase_unused(graph: fx.Graph) -> None:
    """What led to the softmax. Modules stay: they may draw random numbers."""
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "call_method", "get_attr") and not node.users:
            graph.erase_node(node)


# --- the pattern
# ------------------------------------------------------------------------------------------------


def _replace(module: nn.Module, graph: fx.Graph, softmax: fx.Node) -> None:
    """Put one call in the place of all from the first product to the second."""
    scores, scales, masks = _before(softmax.args[0] if softmax.args else None)
    last, between = _after(module, softmax)
    query, key = scores.args[0], scores.args[1]
    value = last.args[1]
    with graph.inserting_before(last):
        scale: Any = 1.0
        for found in scales:
            query, scale = _scaled(graph, query, scale, found)
        transposed = graph.call_method("transpose", (key, -2, -1))
        mask = _mask(graph, query, masks)
        call = graph.call_function(
            F.scaled_dot_product_attention,
            (query, transposed, value),
            {"attn_mask": mask, "scale": scale},
        )
    last.replace_all_uses_with(call)
    for node in (last, *reversed(between), softmax):
        graph.erase_node(node)


def _before(node: Any) -> tuple[fx.Node, list[tuple[bool, Any]], list[tuple[Any, Any]]]:
    """From the softmax back to the first product: that, the scales (whether divided by, and what),
    and the masks: what is masked and with what, or None and what is added."""
    scales: list[tuple[bool, Any]] = []
    masks: list[tuple[Any, Any]] = []
    while isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        if len(node.users) != 1:
            raise NotRewritten("its scores are used for something else, too")
        if scales and not masks and node.target in (*_MASKED_FILL, *_ADD, torch.where):
            raise NotRewritten("its scores are masked before they are scaled")
        if node.target in _MATMUL:
            return node, scales, masks
        if node.target in _CASTS:
            node = node.args[0]
        elif node.target in _MASKED_FILL:
            masks.append((node.args[1], node.args[2]))
            node = node.args[0]
        elif node.target is torch.where and len(node.args) == 3:
            masks.append(((node.args[0],), node.args[2]))
            node = node.args[1]
        elif node.target in (*_MUL, *_DIV):
            scores, other = _operands(node)
            scales.append((node.target in _DIV, other))
            node = scores
        elif node.target in _ADD:
            scores, other = _operands(node)
            masks.append((None, other))
            node = scores
        else:
            break
    raise NotRewritten(f"unknown on the way to its softmax: {node}")


def _operands(node: fx.Node) -> tuple[Any, Any]:
    """The scores, which the first product leads to, and the other one."""
    first, second = node.args[0], node.args[1]
    turned = node.target in (*_MUL, *_ADD) and not _leads_to_product(first)
    return (second, first) if turned else (first, second)


def _leads_to_product(node: Any) -> bool:
    steps = (*_MUL, *_DIV, *_ADD, *_MASKED_FILL, *_CASTS)
    while isinstance(node, fx.Node) and node.target in steps:
        node = node.args[0]
    return isinstance(node, fx.Node) and node.target in _MATMUL


def _after(module: nn.Module, softmax: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """From the softmax on to the second product: that, and what lies in between."""
    between: list[fx.Node] = []
    node = softmax
    while len(node.users) == 1:
        user = next(iter(node.users))
        if user.target in _MATMUL and user.args[0] is node:
            return user, between
        if user.target not in _CASTS or user.args[0] is not node:
            p = _dropout(module, user)
            if p is None:
                break
            if p > 0:
                raise NotRewritten(f"dropout {p:g} in it: fused, it draws other random numbers")
        between.append(user)
        node = user
    raise NotRewritten("what its softmax makes is used for something else, too")


def _dropout(module: nn.Module, node: fx.Node) -> float | None:
    """The probability by which it drops in this mode; None if it is no dropout."""
    if node.op == "call_module":
        found = module.get_submodule(str(node.target))
        if isinstance(found, nn.Identity):
            return 0.0
        return (float(found.p) if found.training else 0.0) if type(found) is nn.Dropout else None
    if node.target is F.dropout:
        named = zip(("input", "p", "training"), node.args, strict=False)
        given: dict[str, Any] = {**dict(named), **node.kwargs}
        return float(given.get("p", 0.5)) if given.get("training", True) else 0.0
    return None


def _is_softmax(module: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        found = module.get_submodule(str(node.target))
        return isinstance(found, nn.Softmax) and bool(found.dim == -1)
    if node.target not in _SOFTMAX:
        return False
    return bool(node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None) == -1)


def _has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(kinds) or bool(module._backward_pre_hooks)


def _scaled(graph: fx.Graph, query: Any, scale: Any, found: tuple[bool, Any]) -> tuple[Any, Any]:
    """Numbers go into the scale; a tensor (one for each head) is multiplied into the queries."""
    divided, by = found
    apply = operator.truediv if divided else operator.mul
    if isinstance(by, fx.Node) and by.target not in (math.sqrt, operator.pow, operator.truediv):
        return graph.call_function(apply, (query, by)), scale
    if isinstance(by, fx.Node) or isinstance(scale, fx.Node):
        return query, graph.call_function(apply, (scale, by))
    return query, scale / by if divided else scale * by


def _mask(graph: fx.Graph, query: Any, masks: list[tuple[Any, Any]]) -> Any:
    if not masks:
        return None
    if len(masks) > 1:
        raise NotRewritten("it has more than one mask")
    masked, value = masks[0]
    dtype = graph.call_function(getattr, (query, "dtype"))
    if masked is None:
        return graph.call_method("to", (value, dtype))
    kept = isinstance(masked, tuple)  # of torch.where
    hidden = graph.call_method("logical_not", masked) if kept else masked
    if value == -math.inf:
        return masked[0] if kept else graph.call_method("logical_not", (masked,))
    zeros = graph.call_function(torch.zeros_like, (hidden,), {"dtype": dtype})
    return graph.call_method("masked_fill", (zeros, hidden, value))
