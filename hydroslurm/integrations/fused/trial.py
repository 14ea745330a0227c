"""Is a proposal the module's own forward, and is it faster?

Equal means two things. In double precision, on the user's input and on it made small and large, in
training and evaluation, outputs and gradients are the same but for rounding: that tells one formula
from another, such as GELU from its tanh form, or one eps from another. In the user's own precision
the proposal is about as far from the exact result as the module is.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hydroslurm.integrations.fused.equality import (
    Result,
    require_as_exact,
    require_same_formula,
)
from hydroslurm.integrations.fused.rewriters import (
    Forward,
    NotRewritten,
    Proposal,
    first_line,
)
from hydroslurm.integrations.fused.swap import Fused, put

_EXACT = ((True, 1.0), (True, 1e-3), (True, 8.0), (False, 1.0))
"""Training or evaluation, and what the input is multiplied by."""
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
_TIMED_S, _SAMPLE_S, _PAIRS = 0.3, 1e-3, (5, 30)


@dataclass(frozen=True)
class Call:
    """What a module was called with, and within which autocast: device, and type if it is on."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: tuple[str, torch.dtype | None]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """With tensors of its own: the training may write into those that it was given."""
        own = [pytree.tree_map_only(torch.Tensor, _cloned, one) for one in (args, dict(kwargs))]
        tensors = [one for one in pytree.tree_leaves(own) if isinstance(one, torch.Tensor)]
        device = tensors[0].device.type if tensors else "cpu"
        is_on = torch.is_autocast_enabled(device)
        return cls(own[0], own[1], (device, torch.get_autocast_dtype(device) if is_on else None))

    @property
    def shapes(self) -> tuple[Any, ...]:
        """By which two calls take the same time."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return tuple(one.shape if isinstance(one, torch.Tensor) else str(one) for one in leaves)

    def exact(self, scale: float) -> Call:
        """In double precision, all of it multiplied by this."""

        def exact(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_complex():
                return tensor.to(torch.complex128)
            if not tensor.is_floating_point():
                return tensor
            made = tensor.detach().double() * scale
            return made.requires_grad_(tensor.requires_grad)

        args, kwargs = pytree.tree_map_only(torch.Tensor, exact, (self.args, dict(self.kwargs)))
        return Call(args, kwargs, (self.autocast[0], None))


class Trial:
    """A module on one call. What it gives itself is found once, for all that is proposed."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self._module = module
        self._call = call
        self._forward: Forward = type(module).forward
        self._own: dict[tuple[bool, float | None], tuple[Result, nn.Module]] = {}

    def difference(self, forward: Forward, *, known: bool = False) -> float:
        """The largest between the module and the proposal, relative to the largest value.

        Args:
            known: that it is the formula of another module of the same class and settings.

        Raises:
            NotRewritten: they are not the same; or the proposal has failed.
        """
        for training, scale in _EXACT[:1] if known else _EXACT:
            wanted, own = self._of_own(training, scale)
            seen, new = self._run(forward, training, scale)
            require_same_formula(wanted, seen)
            _require_same_buffers(own, new)
        wanted, _ = self._of_own(True, None)
        seen, _ = self._run(forward, True, None)
        require_as_exact(wanted, seen, self._of_own(True, 1.0)[0])
        return wanted.difference(seen)

    def speedup(self, proposal: Proposal, like: str) -> float:
        """Time of a forward and backward of the module over that with the proposal in its place."""
        own, new = _bare(self._module, True), _bare(self._module, True)
        put(new, Fused(new, proposal, like))
        in_place: Forward = type(new).forward
        return time_ratio(_step(self._forward, own, self._call), _step(in_place, new, self._call))

    def _of_own(self, training: bool, scale: float | None) -> tuple[Result, nn.Module]:
        if (training, scale) not in self._own:
            self._own[training, scale] = self._run(self._forward, training, scale)
        return self._own[training, scale]

    def _run(
        self, forward: Forward, training: bool, scale: float | None
    ) -> tuple[Result, nn.Module]:
        """On a copy, which is returned as well; in double precision if there is a scale."""
        bare = _bare(self._module, training)
        if scale is None:
            return _run(forward, bare, self._call), bare
        return _run(forward, bare.double(), self._call.exact(scale)), bare


def time_ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    """Time of the first over that of the second: the median of pairs, one after the other."""
    second()
    first()
    each_s = _seconds(first, 1)
    repeats = max(1, round(_SAMPLE_S / max(each_s, 1e-7)))
    ratios: list[float] = []
    deadline = time.perf_counter() + _TIMED_S
    while len(ratios) < _PAIRS[0] or (len(ratios) < _PAIRS[1] and time.perf_counter() < deadline):
        pair = [first, second] if len(ratios) % 2 else [second, first]
        taken = {one: _seconds(one, repeats) for one in pair}
        ratios.append(taken[first] / taken[second])
    return statistics.median(ratios)


def backward(
    outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Gradients of the sources, for made-up ones of the outputs; no ``grad`` is touched."""
    if not outputs or not sources:
        return []
    made = [torch.randn_like(one) for one in outputs]
    return list(torch.autograd.grad(outputs, sources, made, allow_unused=True))


@contextmanager
def seeded() -> Iterator[None]:
    """The random numbers of a seed, and those of before afterwards."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if _uses_cuda() else []):
        torch.manual_seed(0)
        yield


def rng_state() -> torch.Tensor:
    """Of all generators that a forward draws from by default."""
    states = [torch.get_rng_state()]
    if _uses_cuda():
        states.append(torch.cuda.get_rng_state())
    return torch.cat(states)


def _run(forward: Forward, module: nn.Module, call: Call) -> Result:
    """Call it, and its backward, with the random numbers of a seed.

    Raises:
        NotRewritten: it failed.
    """
    args, kwargs, sources = _sources(module, call)
    try:
        with seeded(), torch.enable_grad(), _autocast(call):
            leaves = pytree.tree_leaves(forward(module, *args, **kwargs))
            rng = rng_state()
            outputs = [one for one in leaves if isinstance(one, torch.Tensor)]
            gradients = backward([one for one in outputs if one.requires_grad], sources)
    except NotRewritten:
        raise
    except Exception as error:
        raise NotRewritten(first_line(error)) from error
    rest = [one for one in leaves if not isinstance(one, torch.Tensor)]
    return Result([one.detach() for one in outputs], gradients, rest, rng)


def _step(forward: Forward, module: nn.Module, call: Call) -> Callable[[], object]:
    """A forward and a backward, with as little around them as can be."""
    args, kwargs, sources = _sources(module, call)
    made: list[torch.Tensor] = []

    def step() -> None:
        with torch.enable_grad(), _autocast(call):
            leaves = pytree.tree_leaves(forward(module, *args, **kwargs))
            outputs = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
            if not made:
                made.extend(torch.randn_like(one) for one in outputs)
            if outputs and sources:
                torch.autograd.grad(outputs, sources, made, allow_unused=True)

    with seeded():
        step()
    return step


def _sources(module: nn.Module, call: Call) -> tuple[Any, Any, list[torch.Tensor]]:
    """The arguments as leaves, and all that has a gradient: they, and the weights."""
    args, kwargs = pytree.tree_map_only(torch.Tensor, _cloned, (call.args, dict(call.kwargs)))
    given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    return args, kwargs, [one for one in (*given, *module.parameters()) if one.requires_grad]


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _bare(module: nn.Module, training: bool) -> nn.Module:
    """A copy that nobody else sees: without hooks, which may count or keep what they are given.

    Raises:
        NotRewritten: it cannot be copied.
    """
    try:
        made = copy.deepcopy(module)
    except Exception as error:
        raise NotRewritten(f"it cannot be copied: {first_line(error)}") from error
    for one in made.modules():
        for name in _HOOKS:
            if name in vars(one):
                vars(one)[name] = OrderedDict()
    return made.train(training)


def _require_same_buffers(own: nn.Module, new: nn.Module) -> None:
    for (name, one), other in zip(own.named_buffers(), new.buffers(), strict=True):
        if not torch.allclose(one.double(), other.double(), equal_nan=True):
            raise NotRewritten(f"the fused one leaves another {name}")


@contextmanager
def _autocast(call: Call) -> Iterator[None]:
    device, dtype = call.autocast
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        yield


def _uses_cuda() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _seconds(call: Callable[[], object], repeats: int) -> float:
    _synchronize()
    begin_s = time.perf_counter()
    for _ in range(repeats):
        call()
    _synchronize()
    return (time.perf_counter() - begin_s) / repeats


def _synchronize() -> None:
    if _uses_cuda():
        torch.cuda.synchronize()
