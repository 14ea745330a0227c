"""A step of an elastic run that cannot be completed leaves nothing behind.

Weights that an optimizer steps need no copy: a step fails in the sum of its gradients, and without
gradients an optimizer steps nowhere. All else that a registered object keeps is copied between two
steps: averages of the weights, teachers, buffers, attributes of modules, learning rates, states.
Weights and optimizer states are copied too where steps sum gradients after an optimizer has stepped
(a GAN, PPO, LBFGS) or change weights beside it (SAM, clipping): the first step, which is copied
whole, shows whether they do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hydroslurm.checkpoint.census import copied, put
from hydroslurm.checkpoint.walk import is_plain
from hydroslurm.elastic.reduction import Accumulation, GradientSum
from hydroslurm.training.objects import Objects
from hydroslurm.training.script import fingerprint

_LARGE = 10_000
"""Entries of a list or dict that is not copied: what a step has appended is removed."""
_MOST_FROZEN = 4
"""Frozen weights beside trained ones of so many times fewer bytes (the base of a LoRA) are copied
only once they have been seen to change."""
_OF_TORCH = frozenset(vars(torch.nn.Module())) - {"training"}
_WRITTEN = (dict, list, set, deque)


class StepUndo:
    """What one step changes beside the weights, as it was before.

    Attributes:
        is_kept: the copies are of the state before the step that comes next, or is under way.
    """

    def __init__(self, objects: Objects, sums: GradientSum) -> None:
        self.is_kept = False
        self._objects = objects
        self._sums = sums
        self._notes: dict[int, _Note] = {}
        self._states: dict[str, Any] = {}
        self._marks: dict[int, tuple[torch.Tensor, object]] = {}
        self._changing: set[int] = set()
        self._keeps_weights: bool | None = None  # None: no step has shown yet whether it has to
        self._sums_at_step: int | None = None
        self._accumulation = Accumulation()
        self._digest: object = None

    def keep(self) -> None:
        """Note everything, between two steps."""
        things = self._objects.by_name().values()
        before, self._notes = self._notes, {}
        optimizers = [one for one in things if isinstance(one, Optimizer)]
        trees = [list(one.modules()) for one in things if isinstance(one, torch.nn.Module)]
        left_out = self._left_out(trees)

        def note(holder: dict[Any, Any], wants: Callable[[Any], bool] = _is_written) -> None:
            known = before.get(id(holder))
            kept = known if known is not None and known.holder is holder else _Note(holder)
            kept.take(wants)
            self._notes[id(holder)] = kept

        with torch.no_grad():
            for module in {id(one): one for tree in trees for one in tree}.values():
                if isinstance(module, DistributedDataParallel):
                    continue  # made anew at a change
                note(vars(module))
                if module._buffers:
                    note(module._buffers)
                if not left_out.issuperset(map(id, module._parameters.values())):
                    note(module._parameters, lambda it: id(it) not in left_out and _is_written(it))
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    note(group, lambda one: type(one) is not list and _is_written(one))
                if self._keeps_weights is not False:
                    note(optimizer.state, lambda _: False)
                    for state in optimizer.state.values():
                        note(state)
            self._states = {
                name: _copied(thing.state_dict(), self._states.get(name))
                for name, thing in self._objects.by_name().items()
                if not isinstance(thing, (torch.nn.Module, Optimizer))
            }
        self._sums_at_step = None
        if self._keeps_weights is None:
            self._digest = self._digest_now()
        self.is_kept = True

    def kept_of(self, module: torch.nn.Module, name: str) -> Any:
        """The copy of a module's own buffer."""
        return self._notes[id(module._buffers)].entries[name][1]

    # --- what a step does
    # --------------------------------------------------------------------------------------------

    def before_optimizer(self) -> None:
        """An optimizer steps in a step that counts so far."""
        if self._sums_at_step is None:
            self._sums_at_step = self._sums.begun
        if self._keeps_weights is None and self._digest_now() != self._digest:
            self._keeps_weights = True

    def after_optimizer(self) -> None:
        """It has stepped."""
        self._accumulation.used(self._trained())
        if self._keeps_weights is None:
            self._digest = self._digest_now()

    def completed(self) -> None:
        """The step counts; what it has shown is what the next ones are expected to do."""
        if self._has_summed_late():
            self._keeps_weights = True
        elif self._keeps_weights is None and self._sums_at_step is not None:
            self._keeps_weights = self._digest_now() != self._digest

    def accumulates(self) -> bool:
        """Whether there are gradients for a later step of an optimizer."""
        return self._sums_at_step is None and self._accumulation.is_under_way(self._trained())

    def hold_back(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step in a step that does not count: it gets no gradients."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def drop(self) -> bool:
        """Everything is as it was before the step. False: it cannot be made so, because an
        optimizer has stepped, or frozen weights have changed, in a way that no step had before."""
        torn = self._keeps_weights is False and self._has_summed_late()
        if torn or any(_mark(one) != mark for one, mark in self._marks.values()):
            return False
        things = self._objects.by_name()
        with torch.no_grad():
            for name, state in self._states.items():
                things[name].load_state_dict(state)
            for note in self._notes.values():
                note.put_back()
        for thing in things.values():
            if isinstance(thing, Optimizer):
                thing.zero_grad(set_to_none=True)
        self._notes, self._states, self._sums_at_step = {}, {}, None  # the objects have them now
        self.is_kept = False
        return True

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _trained(self) -> list[torch.Tensor]:
        return [
            one
            for thing in self._objects.by_name().values()
            if isinstance(thing, Optimizer)
            for group in thing.param_groups
            for one in group["params"]
            if one.requires_grad
        ]

    def _left_out(self, trees: list[list[torch.nn.Module]]) -> set[int]:
        """Weights that are not copied."""
        trained = self._trained()
        ids = {id(one) for one in trained}
        frozen: dict[int, torch.Tensor] = {}
        for tree in trees:
            weights = [one for each in tree for one in each._parameters.values() if one is not None]
            if any(id(one) in ids for one in weights):  # a teacher apart is there to change
                frozen |= {
                    id(one): one for one in weights if not (one.requires_grad or is_lazy(one))
                }
        marks = self._marks
        self._marks = {}
        if _bytes(list(frozen.values())) > _MOST_FROZEN * _bytes(trained):
            now = {key: (one, _mark(one)) for key, one in frozen.items()}
            written = (key for key in marks.keys() & now.keys() if marks[key][1] != now[key][1])
            self._changing.update(written)
            self._marks = {key: now[key] for key in now.keys() - self._changing}
        return {*self._marks, *(ids if self._keeps_weights is False else ())}

    def _has_summed_late(self) -> bool:
        """Whether this step has summed gradients after an optimizer had stepped."""
        return self._sums_at_step is not None and self._sums.begun > self._sums_at_step

    def _digest_now(self) -> object:
        return fingerprint({n: one for n, one in enumerate(self._trained()) if not is_lazy(one)})


class _Note:
    """Of one dict: which objects are in it, and what is in those."""

    def __init__(self, holder: dict[Any, Any]) -> None:
        self.holder = holder
        self.entries: dict[Any, tuple[Any, Any]] = {}

    def take(self, wants: Callable[[Any], bool]) -> None:
        before, none = self.entries, (None, None)
        self.entries = {
            key: (value, _noted(value, before.get(key, none)[1]) if wants(value) else None)
            for key, value in self.holder.items()
            if key not in _OF_TORCH
        }

    def put_back(self) -> None:
        known = self.entries.keys() | _OF_TORCH
        for key in [one for one in self.holder if one not in known]:
            del self.holder[key]
        for key, (value, copy) in self.entries.items():
            self.holder[key] = value if copy is None else _put_back(value, copy)


def _put_back(value: Any, copy: Any) -> Any:
    if isinstance(copy, _Length):
        return copy.put_back(value)
    if isinstance(value, torch.nn.Parameter):
        value.data = copy if value.shape != copy.shape else value.data.copy_(copy)
        return value
    return put(value, copy, device=None)


class _Length:
    """Of a list or dict that is too large for a copy in each step."""

    def __init__(self, value: Any) -> None:
        self._count = len(value)

    def put_back(self, value: Any) -> Any:
        while len(value) > self._count:
            value.popitem() if isinstance(value, dict) else value.pop()
        return value


def _noted(value: Any, before: Any) -> Any:
    return _Length(value) if _is_large(value) else _copied(value, before)


def _copied(value: Any, before: Any = None) -> Any:
    """A copy, in the tensors of an earlier one where they fit."""
    if isinstance(value, torch.Tensor):
        fits = isinstance(before, torch.Tensor) and (before.shape, before.dtype, before.device) == (
            (value.shape, value.dtype, value.device)
        )
        return before.copy_(value) if fits else value.detach().clone()
    if type(value) is dict:
        known = before if type(before) is dict else {}
        return {key: _copied(one, known.get(key)) for key, one in value.items()}
    if type(value) is list and type(before) is list and len(before) == len(value):
        return [_copied(one, known) for one, known in zip(value, before, strict=True)]
    return copied(value)


def _is_written(value: Any) -> bool:
    """Whether a script may write into this object, and it can be copied."""
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not (is_lazy(value) or value.is_meta)
    if _is_large(value) or isinstance(value, np.ndarray):
        return True
    if not isinstance(value, _WRITTEN) or not is_plain(value):
        return False
    # weights in a list, as an LSTM has them, are copied where they are the module's
    parts = value.values() if isinstance(value, dict) else value
    return not any(isinstance(one, torch.nn.Parameter) for one in parts)


def _is_large(value: Any) -> bool:
    return isinstance(value, (list, dict)) and len(value) > _LARGE


def _mark(tensor: torch.Tensor) -> object:
    """What tells that a frozen weight was written to, or replaced."""
    return None if tensor.is_inference() else (tensor._version, tensor.data_ptr())


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(one.nbytes for one in tensors)
