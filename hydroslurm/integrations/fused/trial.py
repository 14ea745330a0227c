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

from hydroslurm.integrations.fused.rewriters import Forward, NotRewritten, Proposal, first_line
from hydroslurm.integrations.fused.swap import Fused, put

LEAST_SPEEDUP = 1.05
"""What is less may be noise."""
SAME_FORMULA = 1e-5
"""Of the largest value in a tensor; modules that compute some of it in float32, whatever they are
given, are off by 1e-7, another approximation of GELU by 1e-4."""
_NOTHING_BUT_ROUNDING = 1e-6
"""Of the largest value in all of them: a gradient may be nothing but rounding, as that of a bias of
the keys before a softmax."""
_EXACT = ((True, 1.0), (True, 1e-3), (True, 8.0), (False, 1.0))
"""Training or evaluation, and what the input is multiplied by."""
_TIMED_S, _SAMPLE_S, _PAIRS = 0.3, 1e-3, (5, 30)


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
            top = max((_largest(a) for a, _ in both), default=0.0)
            yield from ((a, b, top) for a, b in both)

    def difference(self, other: Result) -> float:
        """The largest, relative to the largest value."""
        return max((_off(a, b) / (top or 1.0) for a, b, top in self.pairs(other)), default=0.0)


def run(call: Callable[[], Any], sources: Sequence[torch.Tensor]) -> Result:
    """What a call returns, and the gradients of the sources for made-up ones of what it returns,
    with the random numbers of a seed. No ``grad`` is touched."""
    with seeded(), torch.enable_grad():
        leaves = pytree.tree_leaves(call())
        rng = _rng_state()
        outputs = [one for one in leaves if isinstance(one, torch.Tensor)]
        trained = [one for one in outputs if one.requires_grad]
        gradients: list[torch.Tensor | None] = []
        if trained and sources:
            made = [torch.randn_like(one) for one in trained]
            gradients = list(torch.autograd.grad(trained, sources, made, allow_unused=True))
    rest = [one for one in leaves if not isinstance(one, torch.Tensor)]
    return Result([one.detach() for one in outputs], gradients, rest, rng)


@dataclass(frozen=True)
class Call:
    """What a module was called with, and within which autocast: device, and type if it is on."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    autocast: tuple[str, torch.dtype | None]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """With tensors of its own: the training may write into those that it was given."""
        own = pytree.tree_map_only(torch.Tensor, _cloned, (args, dict(kwargs)))
        tensors = _tensors_in(own)
        device = tensors[0].device.type if tensors else "cpu"
        is_on = torch.is_autocast_enabled(device)
        return cls(own, (device, torch.get_autocast_dtype(device) if is_on else None))

    def exact(self, scale: float) -> Call:
        """In double precision, all of it multiplied by this."""

        def exact(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.is_complex():
                return tensor.to(torch.complex128)
            if not tensor.is_floating_point():
                return tensor
            return (tensor.detach().double() * scale).requires_grad_(tensor.requires_grad)

        return Call(pytree.tree_map_only(torch.Tensor, exact, self.given), (self.autocast[0], None))

    def prepare(
        self, forward: Forward, module: nn.Module
    ) -> tuple[Callable[[], Any], list[torch.Tensor]]:
        """The call of a forward, and all that has a gradient in it: its arguments, and weights."""
        args, kwargs = own = pytree.tree_map_only(torch.Tensor, _cloned, self.given)
        device, dtype = self.autocast

        def call() -> Any:
            with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
                return forward(module, *args, **kwargs)

        sources = (*_tensors_in(own), *module.parameters())
        return call, [one for one in sources if one.requires_grad]


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
            _require_same_formula(wanted, seen)
            for (name, one), other in zip(own.named_buffers(), new.buffers(), strict=True):
                if not torch.allclose(one.double(), other.double(), equal_nan=True):
                    raise NotRewritten(f"the fused one leaves another {name}")
        wanted, _ = self._of_own(True, None)
        seen, _ = self._run(forward, True, None)
        _require_as_exact(wanted, seen, self._of_own(True, 1.0)[0])
        return wanted.difference(seen)

    def speedup(self, proposal: Proposal, like: str) -> float:
        """Time of a forward and backward of the module over that with the proposal in its place."""
        own, new = _bare(self._module, True), _bare(self._module, True)
        put(new, Fused(new, proposal, like))
        calls = (_step(one, self._call) for one in (own, new))
        return time_ratio(*calls)

    def _of_own(self, training: bool, scale: float | None) -> tuple[Result, nn.Module]:
        if (training, scale) not in self._own:
            self._own[training, scale] = self._run(self._forward, training, scale)
        return self._own[training, scale]

    def _run(
        self, forward: Forward, training: bool, scale: float | None
    ) -> tuple[Result, nn.Module]:
        """On a copy, which is returned as well; in double precision if there is a scale."""
        bare = _bare(self._module, training)
        call = self._call
        if scale is not None:
            bare, call = bare.double(), call.exact(scale)
        before = dict(vars(bare))
        try:
            result = run(*call.prepare(forward, bare))
        except NotRewritten:
            raise
        except Exception as error:
            raise NotRewritten(first_line(error)) from error
        if any(before.get(name, before) is not value for name, value in vars(bare).items()):
            raise NotRewritten("its forward sets attributes")
        return result, bare


def time_ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    """Time of the first over that of the second: the median of pairs, one after the other."""
    second()
    first()
    repeats = max(1, round(_SAMPLE_S / max(_seconds(first, 1), 1e-7)))
    ratios: list[float] = []
    deadline = time.perf_counter() + _TIMED_S
    while len(ratios) < _PAIRS[0] or (len(ratios) < _PAIRS[1] and time.perf_counter() < deadline):
        pair = [first, second] if len(ratios) % 2 else [second, first]
        taken = {one: _seconds(one, repeats) for one in pair}
        ratios.append(taken[first] / taken[second])
    return statistics.median(ratios)


def relative(want: torch.Tensor, have: torch.Tensor) -> float:
    """Their difference, relative to the largest value."""
    return _off(want, have) / (_largest(want) or 1.0)


@contextmanager
def seeded() -> Iterator[None]:
    """The random numbers of a seed, and those of before afterwards."""
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if _uses_cuda() else []):
        torch.manual_seed(0)
        yield


def _require_same_kind(wanted: Result, seen: Result) -> None:
    """The same number of tensors, their types, all that is no tensor, and the random numbers."""
    kinds, others = ([(one.dtype, one.shape) for one in r.outputs] for r in (wanted, seen))
    if kinds != others or wanted.rest != seen.rest:
        raise NotRewritten("its output has other parts, or another type")
    if not torch.equal(wanted.rng, seen.rng):
        raise NotRewritten("the fused one draws other random numbers")
    if [one is None for one in wanted.gradients] != [one is None for one in seen.gradients]:
        raise NotRewritten("another gradient is missing")


def _require_same_formula(wanted: Result, seen: Result) -> None:
    """The same in double precision."""
    _require_same_kind(wanted, seen)
    for want, have, top in wanted.pairs(seen):
        allowed = SAME_FORMULA * _largest(want) + _NOTHING_BUT_ROUNDING * top
        if not torch.allclose(want, have, rtol=0.0, atol=allowed, equal_nan=True):
            raise NotRewritten(f"another result: differs by {_off(want, have) / (top or 1):.1g}")


def _require_as_exact(wanted: Result, seen: Result, exact: Result) -> None:
    """In the user's precision about as near to the exact result as the module is."""
    _require_same_kind(wanted, seen)
    exact_of = {id(want): right for want, right, _ in wanted.pairs(exact)}
    for want, have, top in wanted.pairs(seen):
        if not want.is_floating_point():
            continue
        right, eps = exact_of[id(want)], torch.finfo(want.dtype).eps
        own, new = _off(want, right), _off(have, right)
        if new > 4 * own + eps * (8 * _largest(right) + 2 * top):
            raise NotRewritten(
                f"less exact in {want.dtype}: off by {new:.1g}, where the module is by {own:.1g}"
            )


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    if not tensor.numel():
        return 0.0
    return tensor.detach().double().abs().nan_to_num(posinf=0.0).max().item()


def _off(want: torch.Tensor, have: torch.Tensor) -> float:
    return _largest(want.double() - have.double())


def _rng_state() -> torch.Tensor:
    """Of all generators that a forward draws from by default."""
    cuda = [torch.cuda.get_rng_state()] if _uses_cuda() else []
    return torch.cat([torch.get_rng_state(), *cuda])


def _step(module: nn.Module, call: Call) -> Callable[[], object]:
    """A forward and a backward, with as little around them as can be."""
    forward_once, sources = call.prepare(lambda own, *args, **kw: own.forward(*args, **kw), module)
    made: list[torch.Tensor] = []

    def step() -> None:
        with torch.enable_grad():
            leaves = _tensors_in(forward_once())
            outputs = [one for one in leaves if one.requires_grad]
            if not made:
                made.extend(torch.randn_like(one) for one in outputs)
            if outputs and sources:
                torch.autograd.grad(outputs, sources, made, allow_unused=True)

    with seeded():
        step()
    return step


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _cloned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _bare(module: nn.Module, training: bool) -> nn.Module:
    """A copy that nobody else sees: without hooks, which may count or keep what they are given."""
    try:
        made = copy.deepcopy(module)
    except Exception as error:
        raise NotRewritten(f"it cannot be copied: {first_line(error)}") from error
    for one in made.modules():
        for name, value in vars(one).items():
            if "_hooks" in name and isinstance(value, dict):
                vars(one)[name] = OrderedDict()
    return made.train(training)


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _seconds(call: Callable[[], object], repeats: int) -> float:
    begin_s = _now_s()
    for _ in range(repeats):
        call()
    return (_now_s() - begin_s) / repeats


def _now_s() -> float:
    """When the device has done what it was given."""
    if _uses_cuda():
        torch.cuda.synchronize()
    return time.perf_counter()
