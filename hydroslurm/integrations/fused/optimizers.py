"""``optimize_optimizer``: an optimizer's step as one fused call."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused.choices import Choice, Choices
from hydroslurm.integrations.fused.rewriters import first_line
from hydroslurm.integrations.fused.trial import LEAST_SPEEDUP, relative, seeded, time_ratio

_STEPS = 3
_MOST_ULPS = 64


def optimize_optimizer(optimizer: Optimizer) -> Choices:
    """Let an optimizer of PyTorch's use its ``fused=True``, where that is equal and faster. It is
    tried on a copy of the weights, with made-up gradients.

    The optimizer stays the object that it is. The choice is part of its ``state_dict()``, so that a
    resumed run goes on with the choice of its first attempt.

    Returns:
        One row. Its text is a table.

    Raises:
        UsageError: not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimize_optimizer({type(optimizer).__name__}): wanted an optimizer")
    row = Choice(("optimizer",), type(optimizer).__name__)
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    if not is_torch or not all("fused" in group for group in optimizer.param_groups):
        return Choices([replace(row, reason="it has no fused form")])
    row = replace(row, replacement="fused=True")
    if all(group["fused"] for group in optimizer.param_groups):
        return Choices([replace(row, reason="in use already")])
    row = _tried(optimizer, row)
    if row.applied:
        _fuse(optimizer)
    return Choices([row])


def _tried(optimizer: Optimizer, row: Choice) -> Choice:
    """Compared with the optimizer as it is, and timed."""
    try:
        own, new = _copied(optimizer), _copied(optimizer)
        _fuse(new)
        difference = 0.0
        for _ in range(_STEPS):
            own.step()
            new.step()
        for want, have in zip(_weights(own), _weights(new), strict=True):
            off = relative(want, have)
            if off > _MOST_ULPS * torch.finfo(want.dtype).eps:
                return replace(row, reason=f"another result: differs by {off:.1g}")
            difference = max(difference, off)
        speedup = time_ratio(own.step, new.step)
    except Exception as error:
        return replace(row, reason=first_line(error))
    is_faster = speedup >= LEAST_SPEEDUP
    reason = "" if is_faster else "not faster"
    return replace(row, speedup=speedup, difference=difference, applied=is_faster, reason=reason)


def _copied(optimizer: Optimizer) -> Optimizer:
    """One of the same class with weights of its own, and gradients that are the same for each."""
    groups = []
    with seeded():
        for group in optimizer.param_groups:
            weights = [one.detach().clone() for one in group["params"]]
            for one, own in zip(weights, group["params"], strict=True):
                one.grad = torch.randn_like(one) if own.requires_grad else None
            groups.append({**group, "params": weights})
    kind: Any = type(optimizer)
    made: Optimizer = kind(groups)
    made.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return made


def _weights(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def _fuse(optimizer: Optimizer) -> None:
    """The flag, and what it asks of the state: steps on the device of the weights."""
    for group in optimizer.param_groups:
        group.update(fused=True, foreach=False)
    for weight in _weights(optimizer):
        step = optimizer.state.get(weight, {}).get("step")
        if isinstance(step, torch.Tensor):
            optimizer.state[weight]["step"] = step.to(weight.device, torch.float32)
