"""A step of an elastic run that cannot be completed leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hydroslurm.training.objects import Objects


class StepUndo:
    """What one step changes beside the weights, as it was before.

    Attributes:
        buffers: of the models, each with what it held before the step.
    """

    def __init__(self, objects: Objects, modules: Sequence[DistributedDataParallel]) -> None:
        self.buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._objects = objects
        self._modules = modules
        self._small: dict[str, Any] | None = None

    def keep(self) -> None:
        """Note the buffers, between two steps."""
        if not self.buffers:
            self.buffers = [
                (buffer, buffer.detach().clone())
                for module in self._modules
                for buffer in module.module.buffers()
            ]
        for buffer, kept in self.buffers:
            kept.copy_(buffer)

    def hold_back(self, optimizer: Optimizer) -> None:
        """Before the optimizer of a step that does not count: without gradients it steps nowhere;
        what is called behind it, such as a scheduler, is noted now and put back later."""
        if self._small is None:
            self._small = {
                name: thing.state_dict()
                for name, thing in self._objects.by_name().items()
                if not isinstance(thing, (torch.nn.Module, Optimizer))
            }
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def drop(self) -> None:
        """Everything is as it was before the step."""
        with torch.no_grad():
            for buffer, kept in self.buffers:
                buffer.copy_(kept)
        objects = self._objects.by_name()
        for name, state in (self._small or {}).items():
            objects[name].load_state_dict(state)
        self._small = None
        for thing in objects.values():
            if isinstance(thing, Optimizer):
                thing.zero_grad(set_to_none=True)
