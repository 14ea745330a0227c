"""Is a proposal the module's own forward, and is it faster?

Equal means two things. In double precision, on the user's input and on it made small and large, in
training and evaluation, outputs and gradients are the same but for rounding: that tells one formula
from another, such as GELU from its tanh form, or one eps from another. In the user's own precision
the proposal is about as far from the exact result as the module is.
"""

from __future__ import annotations

import copy
import functools
import statistics
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils import benchmark

from hydroslurm.integrations.fused.rewriters import Forward, NotRewritten, Proposal, first_line

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
_TIMED_S, _PAIRS = 0.05, 3

Step = Callable[[], tuple[list[Any], Sequence[torch.Tensor | None]]]
"""A forward and its backward: all parts of the output, and gradients. No ``grad`` is touched."""


@dataclass(frozen=True)
class Result:
    """What a step has made.

    Attributes:
        outputs: tensors. rest: other parts of the output. gradients: of inputs and weights.
        rng: the state of the random numbers behind it.
    """

    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    rest: list[Any]
    rng: torch.Tensor

    @classmethod
    def of(cls, step: Step) -> Result:
        """With the random numbers of a seed."""
        with seeded():
            leaves, gradients = step()
            cuda = [torch.cuda.get_rng_state()] if _uses_cuda() else []
            rng = torch.cat([torch.get_rng_state(), *cuda])
        outputs = [one.detach() for one in _tensors_in(leaves)]
        rest = [one for one in leaves if not isinstance(one, torch.Tensor)]
        return cls(outputs, list(gradients), rest, rng)

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


@dataclass(frozen=True)
class Call:
    """What a module was called with, and within which autocast: device, and type if it is on."""

    given: tuple[tuple[Any, ...], dict[str, Any]]
    autocast: tuple[str, torch.dtype | None]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """With tensors of its own: the training may write into those that it was given."""
        given = pytree.tree_map_only(torch.Tensor, _cloned, (args, dict(kwargs)))
        device = next((one.device.type for one in _tensors_in(given)), "cpu")
        is_on = torch.is_autocast_enabled(device)
        return cls(given, (device, torch.get_autocast_dtype(device) if is_on else None))

    def step(self, forward: Forward, module: nn.Module, scale: float | None = None) -> Step:
        """Of a forward, with the gradients of its arguments and weights for what it returns, whose
        own are made up in the first step.

        Args:
            scale: in double precision, without autocast, and all of the input multiplied by it.
        """
        own = functools.partial(_cloned, scale=scale)
        args, kwargs = given = pytree.tree_map_only(torch.Tensor, own, self.given)
        weights = (*_tensors_in(given), *module.parameters())
        sources = [one for one in weights if one.requires_grad]
        device, dtype = self.autocast
        is_cast = dtype is not None and scale is None
        made: list[torch.Tensor] = []

        def step() -> tuple[list[Any], Sequence[torch.Tensor | None]]:
            with torch.enable_grad():
                with torch.autocast(device, dtype=dtype, enabled=is_cast):
                    leaves = pytree.tree_leaves(forward(module, *args, **kwargs))
                trained = [one for one in _tensors_in(leaves) if one.requires_grad]
                if not made:
                    made.extend(torch.randn_like(one) for one in trained)
                if not (trained and sources):
                    return leaves, ()
                return leaves, torch.autograd.grad(trained, sources, made, allow_unused=True)

        return step


class Trial:
    """A module on one call. What it gives itself is found once, for all that is proposed."""

    def __init__(self, module: nn.Module, call: Call) -> None:
        self._module = module
        self._call = call
        self._of_own = functools.cache(functools.partial(self._run, type(module).forward))

    def difference(self, forward: Forward) -> float:
        """The largest between the module and the proposal, relative to the largest value.

        Raises:
            NotRewritten: they are not the same; or the proposal has failed.
        """
        for training, scale in _EXACT:
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

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return module.forward(*args, **kwargs)

        with seeded():
            return time_ratio(self._call.step(forward, own), self._call.step(forward, new))

    def _run(
        self, forward: Forward, training: bool, scale: float | None
    ) -> tuple[Result, nn.Module]:
        """On a copy, which is returned as well; in double precision if there is a scale."""
        bare = _bare(self._module, training)
        if scale is not None:
            bare = bare.double()
        before = dict(vars(bare))
        try:
            result = Result.of(self._call.step(forward, bare, scale))
        except NotRewritten:
            raise
        except Exception as error:
            raise NotRewritten(first_line(error)) from error
        if any(before.get(name, before) is not value for name, value in vars(bare).items()):
            raise NotRewritten("its forward sets attributes")
        return result, bare


def time_ratio(first: Callable[[], object], second: Callable[[], object]) -> float:
    """Time of the first over that of the second: the median of pairs, one after the other."""

    def median_s(call: Callable[[], object]) -> float:
        threads = torch.get_num_threads()
        timer = benchmark.Timer("call()", globals={"call": call}, num_threads=threads)
        return timer.blocked_autorange(min_run_time=_TIMED_S).median

    return statistics.median(median_s(first) / median_s(second) for _ in range(_PAIRS))


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


def _tensors_in(value: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(value) if isinstance(one, torch.Tensor)]


def _cloned(tensor: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    made = tensor.detach().clone()
    if scale is not None and tensor.is_floating_point():
        made = made.double() * scale
    elif scale is not None and tensor.is_complex():
        made = made.to(torch.complex128)
    return made.requires_grad_(tensor.requires_grad)


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
