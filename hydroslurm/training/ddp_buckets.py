"""DDP's buckets: made final before the first step of an attempt instead of after it.

DistributedDataParallel sums gradients in buckets. It guesses the first ones, and once per process
rebuilds them in the order in which the gradients of the first backward arrived. So the first step
of a process sums in other buckets than its other steps. With three ranks or more the order of an
addition depends on the place in the bucket, and a run that was stopped and resumed in a new process
differs in the last bits from one that was not (seen with gloo: after one step).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.checkpoint import rng
from hydroslurm.errors import UsageError
from hydroslurm.runtime.engine import Engine

# A backward notes the order of the gradients, the forward after it makes the new buckets; with
# static_graph the first backward notes nothing.
_MOST_PASSES = 3

UNSETTLED = (
    "DistributedDataParallel makes other buckets after the first step of a process, so that a run "
    "of 3 ranks or more that was stopped differs in the last bits from one that was not. "
    "hydroslurm.warm_up_ddp_buckets(model, batch) before the first step of each attempt makes them "
    "equal"
)
"""What a run says of a model that would cost the bits."""


def warm_up_ddp_buckets(model: nn.Module, batch: Any) -> None:
    """Make DDP's buckets final, so that restarts do not change a bit with three ranks or more.

        model = DistributedDataParallel(model)
        hydroslurm.warm_up_ddp_buckets(model, images)      # in every attempt, before its first step

    Runs a forward and backward of a throw-away batch, two or three times. Gradients, buffers
    (BatchNorm's statistics) and the global random numbers are as before it; no optimizer steps.
    Does nothing for a model without DDP in it (FSDP needs none of this), for one whose buckets are
    final, and with ``find_unused_parameters``, where they never change.

    A collective: all ranks call it, each with a batch of its own, and of any size. A run that is to
    be compared calls it too.

    Args:
        model: as it is trained, wrapped or compiled.
        batch: what the model takes, on its device: one argument, a tuple or list of them, or a
            mapping of keyword arguments. The outputs are summed. Or a function without arguments
            that runs ``model`` itself and returns the loss; it must change nothing else that lasts.

    Raises:
        UsageError: neither the outputs nor what the function returns have a gradient.
    """
    if is_settled(model) in (None, True):
        return
    with _left_as_it_was(model):
        for _ in range(_MOST_PASSES):
            _loss(model, batch).backward()  # type: ignore[no-untyped-call]
            if is_settled(model):
                break


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
    while not isinstance(model, DistributedDataParallel):
        if isinstance(model, Engine):
            model = model.module
        elif type(model).__name__ == "OptimizedModule":  # torch.compile
            model = model._orig_mod
        else:
            return None
    return model


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    outputs = _outputs(model, batch)
    parts = [tensor.float().sum() for tensor in _tensors(outputs) if tensor.requires_grad]
    if not parts:
        raise UsageError(
            "warm_up_ddp_buckets has nothing to go backward from: the "
            f"{type(outputs).__name__} that came out holds no tensor with a gradient. "
            "Give a batch that the model takes, or a function that returns the loss"
        )
    return torch.stack(parts).sum()


def _outputs(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return batch() if callable(batch) else model(batch)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        yield from _tensors(tuple(tree.values()))
    elif isinstance(tree, (tuple, list)):
        for inner in tree:
            yield from _tensors(inner)


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
        rng.restore(numbers)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
