"""Gradients: those that a loop adds up over several of its steps, and the order in which
DistributedDataParallel sums them.

Most loops leave gradients behind that nobody uses again. Those of a part of a model count from the
first step on that was trained without an update of its weights; they are looked at only in such
steps and when something is saved.

DistributedDataParallel sums gradients in buckets. It guesses the first ones, and once per process
rebuilds them in the order in which the gradients of the first backward arrived. So the first step
of a process sums in other buckets than its other steps. With three ranks or more the order of an
addition depends on the place in the bucket, and a run that was stopped and resumed in a new process
would differ in the last bits from one that was not (seen with gloo: after one step). So a
checkpoint has the order, and the next attempt begins with it, before its first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.tree import local_of
from hydroslurm.errors import StateMismatch
from hydroslurm.training.objects import inside, modules_in
from hydroslurm.training.reporting import warning

_LOOKED_AT = 16
"""Weights, spread over a model and its parts, by which it is seen that an optimizer has stepped."""
Models = Callable[[], Mapping[str, Any]]
"""The models that are trained, by name, as DDP has wrapped them; asked for when they are there.
What is no module is passed over."""
Part: TypeAlias = tuple[str, str]
"""A model's name, and the first word in the names of some of its parameters."""


class Gradients:
    """Of one rank."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._weights: dict[Part, list[torch.Tensor]] = {}
        self._versions: list[int] = []
        self._adding_up: set[Part] = set()
        self._loaded: Mapping[str, Mapping[str, torch.Tensor]] = {}

    def begin(self) -> None:
        """The first step comes next. What was loaded is put in place again: a loop may have zeroed
        its gradients before it begins."""
        parts: dict[Part, list[torch.Tensor]] = {}
        for name, model in modules_in(self._models()).items():
            for key, one in model.named_parameters():
                if one.requires_grad:
                    parts.setdefault((name, _part(key)), []).append(one)
        most = max(1, _LOOKED_AT // max(1, len(parts)))
        self._weights = {part: all_[:: -(-len(all_) // most)] for part, all_ in parts.items()}
        self._versions = self._versions_now()
        self._put()

    def end_step(self) -> None:
        """A safe point was reached."""
        self._loaded = {}
        before, self._versions = self._versions, self._versions_now()
        for part, now, then in zip(self._weights, self._versions, before, strict=True):
            if now == then and part not in self._adding_up and self._are_of_use(part):
                self._adding_up.add(part)

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Model -> parameter -> gradient; empty for a loop that updates in each step."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name, key, grad in self._gradients(self._adding_up):
            if grad.any():
                found.setdefault(name, {})[key] = grad
        return found

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Raises:
        StateMismatch: a model has no such parameter.
        """
        self._loaded = state
        self._adding_up.update((name, _part(key)) for name, grads in state.items() for key in grads)
        self._put()

    def _put(self) -> None:
        models = modules_in(self._models()) if self._loaded else {}
        for name, grads in self._loaded.items():
            parameters = dict(models[name].named_parameters()) if name in models else {}
            for key, saved in grads.items():
                one = parameters.get(key)
                if one is None or local_of(one).shape != saved.shape:
                    raise StateMismatch(
                        f"the checkpoint has a gradient of shape {list(saved.shape)} for {key} of "
                        f"{name}, which this model does not have; use another directory= to start "
                        "anew"
                    )
                one.grad = torch.zeros_like(one)
                local_of(one.grad).copy_(saved)

    def _are_of_use(self, part: Part) -> bool:
        """Whether there are any, and no GradScaler has left the step out because of them."""
        grads = [one for _, _, one in self._gradients({part})]
        return any(one.any() for one in grads) and all(one.isfinite().all() for one in grads)

    def _versions_now(self) -> list[int]:
        return [sum(one._version for one in some) for some in self._weights.values()]

    def _gradients(self, parts: Collection[Part]) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Those of some parts, each with the names of its model and its parameter."""
        for name, model in modules_in(self._models()).items() if parts else ():
            for key, one in model.named_parameters():
                is_there = one.grad is not None and one.grad.layout is torch.strided
                if is_there and (name, _part(key)) in parts:
                    yield name, key, local_of(one.grad).detach()


def _part(key: str) -> str:
    return key.partition(".")[0]


# --- DDP's buckets
# ------------------------------------------------------------------------------------------------

STATIC_GRAPH = (
    "DistributedDataParallel(static_graph=True) makes other buckets after the second step of a "
    "process, and remembers more of its first backward than their order: a run of 3 ranks or more "
    "that was stopped differs in the last bits from one that was not. Leave static_graph out"
)
"""What a run says of a model that costs the bits."""


class BucketOrders:
    """What a run saves and resumes of its models' buckets. With two ranks no order matters."""

    def __init__(self, models: Models, *, world_size: int) -> None:
        self._models = models
        self._matters = world_size > 2
        self._orders: Sequence[list[int] | None] = ()

    def state_dict(self) -> list[list[int] | None]:
        """To be saved: an order for each model, or nothing. A collective, in the first call behind
        the first step."""
        if self._matters and not any(self._orders):
            self._orders = [bucket_order(model) for model in self._models().values()]
        return list(self._orders) if any(self._orders) else []

    def load_state_dict(self, orders: Sequence[list[int] | None]) -> None:
        """Begin with buckets in the order that was saved. A collective."""
        self._orders = orders if self._matters else ()
        for model, order in zip(self._models().values(), self._orders, strict=False):
            if order and not settle_buckets(model, order):
                warning(
                    "DistributedDataParallel reduces other parameters than before, or sparse ones: "
                    "the first step of this attempt may differ in the last bits"
                )

    def has_static_graph(self) -> bool:
        """Whether one of the models has buckets that cannot be made equal."""
        found = map(_ddp_in, self._models().values()) if self._matters else ()
        return any(ddp is not None and ddp.static_graph for ddp in found)


def is_settled(model: Any) -> bool | None:
    """Whether DDP's buckets are final; None for a model without DDP in it.

    Reads what torch keeps for its own logging; costs nothing.
    """
    ddp = _ddp_in(model)
    if ddp is None:
        return None
    if ddp.find_unused_parameters and not ddp.static_graph:
        return True
    return bool(getattr(ddp, "_has_rebuilt_buckets", True))  # without it nothing can be said


def bucket_order(model: Any) -> list[int] | None:
    """The order in which DDP has put its parameters into its final buckets, after the first step;
    :func:`settle_buckets` gives it to another process. A collective, if the buckets are not final.

    Returns:
        Numbers of the parameters that it reduces; None where buckets never change, or before the
        first step, or with ``static_graph``, of whose first backward DDP remembers more than this.
    """
    ddp: Any = _ddp_in(model)
    if ddp is None or ddp.static_graph or ddp.find_unused_parameters:
        return None
    if not is_settled(ddp) and not _rebuild(ddp):
        return None
    ddp.logger.set_runtime_stats_and_log()  # looks at them in some steps only
    found = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return [int(number) for number in str(found).replace(",", " ").split()] or None


def settle_buckets(model: Any, order: list[int]) -> bool:
    """Make DDP's buckets final, in the order of an earlier process.

    The gradients of a loss that is zero arrive in this order; no code of the model's runs.
    Gradients, buffers and the global random numbers are as before it. A collective.

    Returns:
        Whether it could: not for other parameters, nor for sparse gradients.
    """
    ddp = _ddp_in(model)
    if ddp is None or is_settled(ddp):
        return True
    named = ddp.module.named_parameters()
    ignored = ddp.parameters_to_ignore
    parameters = [one for name, one in named if one.requires_grad and name not in ignored]
    is_sparse = any(getattr(module, "sparse", False) for module in ddp.modules())
    if is_sparse or sorted(order) != list(range(len(parameters))):
        return False
    trained, synchronises = ddp.module, ddp.broadcast_buffers
    with _left_as_it_was(ddp):
        ddp.module = _Arriving([parameters[number] for number in order])
        ddp.broadcast_buffers = False  # they are the other module's
        try:
            ddp(torch.zeros(1, device=parameters[0].device)).backward()
        finally:
            ddp.module, ddp.broadcast_buffers = trained, synchronises
        return _rebuild(ddp)


class _Arriving(nn.Module):
    """Stands in for a model: a loss of zero whose gradients arrive in this order."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self._ordered = parameters  # a list: they are not this module's

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        # of all that is ready, autograd goes back through what was made last, to its end
        parts = [one.reshape(-1)[:1].sum() for one in reversed(self._ordered)]
        return torch.stack([part.float() for part in parts]).sum() * 0


def _rebuild(ddp: Any) -> bool:
    """What DDP itself does in the forward after its first backward."""
    rebuilt = bool(ddp.reducer._rebuild_buckets())
    ddp._has_rebuilt_buckets = rebuilt
    return rebuilt


def _ddp_in(model: Any) -> DistributedDataParallel | None:
    """DDP, inside of what may be around it."""
    while not (model is None or isinstance(model, DistributedDataParallel)):
        model = inside(model)
    return model


@contextlib.contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Keep gradients, buffers and the global random numbers."""
    gradients = [(p, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    numbers = rng.capture()
    for parameter, _ in gradients:
        parameter.grad = None  # or the throw-away ones would be added to it
    try:
        yield
    finally:
        model.zero_grad()  # tells whoever counts forwards and losses that these are no step's
        rng.restore(numbers)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
