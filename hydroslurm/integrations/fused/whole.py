"""A model as a whole on the user's batch: with and without what was found to be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hydroslurm.integrations.fused.choices import Choice
from hydroslurm.integrations.fused.equality import Result
from hydroslurm.integrations.fused.trial import backward, rng_state, seeded, time_ratio

Switch = Callable[[bool], None]
"""Puts something in place (True) or takes it out; again is no harm."""
MEMORY_FORMAT = "(memory format)"
CHANNELS_LAST = "channels_last"


class Whole:
    """The model, and how it is called with the batch. Nothing of the model is changed by a run:
    gradients are not accumulated, buffers and random numbers are put back.
    """

    def __init__(
        self, model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any] | None
    ) -> None:
        self.model = model
        self._batch = batch
        self._call = call or _call

    def run(self) -> Result:
        """Outputs, and the gradients of all weights for made-up ones of the outputs."""
        with self._unchanged(), torch.enable_grad():
            leaves = pytree.tree_leaves(self._call(self.model, self._batch))
            rng = rng_state()
            outputs = [one for one in leaves if isinstance(one, torch.Tensor)]
            trained = [one for one in self.model.parameters() if one.requires_grad]
            gradients = backward([one for one in outputs if one.requires_grad], trained)
        return Result([one.detach() for one in outputs], gradients, [], rng)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        buffers = [(one, one.detach().clone()) for one in self.model.buffers()]
        with seeded():
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, before in buffers:
                        buffer.copy_(before)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(**batch) if isinstance(batch, dict) else model(batch)


def try_together(whole: Whole, switch: Switch, *, names: str, least: float) -> Choice:
    """Compare the model with and without; the switch is left where it is better.

    Args:
        names: what is replaced, in the table.
        least: the speedup from which on it is.
    """
    switch(False)
    own = whole.run()
    switch(True)
    new = whole.run()
    difference = own.difference(new)
    allowed = max((torch.finfo(one).eps ** 0.5 for one in _precisions(own)), default=0.0)

    def step(on: bool) -> Callable[[], object]:
        def run() -> None:
            switch(on)
            whole.run()

        return run

    speedup = time_ratio(step(False), step(True))
    reason = "" if speedup >= least else "not faster"
    if difference > allowed:
        reason = f"the model's result differs by more than {allowed:.0e}"
    switch(not reason)
    kind = type(whole.model).__name__
    return Choice(("",), kind, names, speedup, difference, applied=not reason, reason=reason)


def _precisions(result: Result) -> list[torch.dtype]:
    """Of the outputs, and of what autocast computes in."""
    used = [one.dtype for one in result.outputs if one.is_floating_point()]
    devices = {one.device.type for one in result.outputs}
    return [*used, *(torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d))]


def channels_last(model: nn.Module) -> Switch | None:
    """Lay the weights of convolutions out as their kernels like them; None if it has none, or if
    they lie otherwise already."""
    weights = [one.weight for one in model.modules() if isinstance(one, nn.Conv2d)]
    if not weights or not all(one.is_contiguous() for one in weights):
        return None
    is_on = False

    def switch(on: bool) -> None:
        nonlocal is_on
        if on != is_on:
            is_on = on
            how = torch.channels_last if on else torch.contiguous_format
            for weight in weights:
                weight.data = weight.data.contiguous(memory_format=how)

    return switch
