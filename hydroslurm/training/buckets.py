"""The order in which DistributedDataParallel sums gradients.

DistributedDataParallel sums gradients in buckets. It guesses the first ones, and once per process
rebuilds them in the order in which the gradients of the first backward arrived. So the first step
of a process sums in other buckets than its other steps. With three ranks or more the order of an
addition depends on the place in the bucket, and a run that was stopped and resumed in a new process
would differ in the last bits from one that was not (seen with gloo: after one step). So a
checkpoint has the order, and the next attempt begins with it, before its first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.checkpoint import rng
from hydroslurm.training.objects import Models, inside
from hydroslurm.training.rank_group import warning

STATIC_GRAPH = (
    "DistributedDataParallel(static_graph=True) makes other buckets after the second step of a "
    "process, and remembers more of its first backward than their order: a run of 3 ranks or more "
    "that was stopped differs in the last bits from one that was not. Leave static_graph out"
)
"""What a run says of a model that costs the bits."""


class BucketOrders:
    """What a run of three ranks or more saves and resumes of its models' buckets."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._orders: Sequence[list[int] | None] = ()

    def state_dict(self) -> list[list[int] | None]:
        """To be saved: an order for each model, or nothing. A collective, in the first call behind
        the first step."""
        if not any(self._orders):
            self._orders = [bucket_order(model) for model in self._models().values()]
        return list(self._orders) if any(self._orders) else []

    def load_state_dict(self, orders: Sequence[list[int] | None]) -> None:
        """Begin with buckets in the order that was saved. A collective."""
        self._orders = orders
        for model, order in zip(self._models().values(), self._orders, strict=False):
            if order and not settle_buckets(model, order):
                warning(
                    "DistributedDataParallel reduces other parameters than before, or sparse ones: "
                    "the first step of this attempt may differ in the last bits"
                )

    def findings(self) -> Iterator[str]:
        """Say whether one of the models has buckets that cannot be made equal."""
        found = map(_ddp_in, self._models().values())
        if any(ddp is not None and ddp.static_graph for ddp in found):
            yield STATIC_GRAPH


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
