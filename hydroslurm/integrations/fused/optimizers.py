"""``optimize_optimizer``: an optimizer's step as one fused call, or as few over all weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch.optim import Optimizer

from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused.choices import Choice, Choices
from hydroslurm.integrations.fused.rewriters import NotRewritten, first_line
from hydroslurm.integrations.fused.trial import LEAST_SPEEDUP, relative, seeded, time_ratio

_WAYS = ("fused", "foreach")
_STEPS = 3
_MOST_ULPS = 64


def optimize_optimizer(optimizer: Optimizer) -> Choices:
    """Let an optimizer of PyTorch's use its ``fused=True`` or ``foreach=True``, where that is equal
    and faster. It is tried on a copy of the weights, with made-up gradients.

    The optimizer stays the object that it is. The choice is part of its ``state_dict()``, so that a
    resumed run goes on with the choice of its first attempt.

    Returns:
        One row for each way. Its text is a table.

    Raises:
        UsageError: not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimize_optimizer({type(optimizer).__name__}): wanted an optimizer")
    is_torch = type(optimizer).__module__.startswith("torch.optim")
    ways = [one for one in _WAYS if is_torch and all(one in g for g in optimizer.param_groups)]
    none = Choice(("optimizer",), type(optimizer).__name__)
    if not ways:
        return Choices([replace(none, reason="it has neither fused nor foreach")])
    rows = [_tried(optimizer, way, replace(none, replacement=f"{way}=True")) for way in ways]
    best = max(rows, key=lambda row: row.speedup or 0.0)
    for number, row in enumerate(rows):
        if row is best and not row.reason:
            _use(optimizer, ways[number])
            rows[number] = replace(row, applied=True)
        elif not row.reason:
            rows[number] = replace(row, reason="slower than the other")
    return Choices(rows)


def _tried(optimizer: Optimizer, way: str, row: Choice) -> Choice:
    """Compared with the optimizer as it is, and timed."""
    if all(group[way] for group in optimizer.param_groups):
        return replace(row, reason="in use already")
    try:
        own, new = _copied(optimizer), _copied(optimizer)
        _use(new, way)
        difference = _stepped_alike(own, new)
        speedup = time_ratio(own.step, new.step)
    except NotRewritten as error:
        return replace(row, reason=str(error))
    except Exception as error:
        return replace(row, reason=first_line(error))
    reason = "" if speedup >= LEAST_SPEEDUP else "not faster"
    return replace(row, speedup=speedup, difference=difference, reason=reason)


def _copied(optimizer: Optimizer) -> Optimizer:
    """With weights of its own, and gradients that are the same for each copy; without hooks, and
    without the ``step`` that a scheduler has wrapped."""
    made = copy.copy(optimizer)
    own = {name: one for name, one in vars(optimizer).items() if name != "step"}
    vars(made).clear()
    vars(made).update(own)
    for name, value in own.items():
        if name.startswith("_optimizer_") and hasattr(value, "clear"):
            setattr(made, name, type(value)())
    made.param_groups, made.state = copy.deepcopy((optimizer.param_groups, optimizer.state))
    with seeded():
        for group in made.param_groups:
            for weight in group["params"]:
                weight.grad = torch.randn_like(weight) if weight.requires_grad else None
    return made


def _use(optimizer: Optimizer, way: str) -> None:
    """The flags, and what they ask of the state: steps on the device of the weights."""
    for group in optimizer.param_groups:
        group.update({one: one == way for one in _WAYS if one in group})
        for weight in group["params"]:
            step = optimizer.state.get(weight, {}).get("step")
            if isinstance(step, torch.Tensor) and not group.get("capturable"):
                device = weight.device if way == "fused" else torch.device("cpu")
                optimizer.state[weight]["step"] = step.to(torch.float32).to(device)


def _stepped_alike(own: Optimizer, new: Optimizer) -> float:
    """Take some steps with both.

    Raises:
        NotRewritten: the weights differ by more than rounding.
    """
    for _ in range(_STEPS):
        own.step()
        new.step()
    difference = 0.0
    for mine, theirs in zip(own.param_groups, new.param_groups, strict=True):
        for want, have in zip(mine["params"], theirs["params"], strict=True):
            off = relative(want, have)
            if off > _MOST_ULPS * torch.finfo(want.dtype).eps:
                raise NotRewritten(f"another result: differs by {off:.1g}")
            difference = max(difference, off)
    return difference
