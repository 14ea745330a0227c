"""``optimize_optimizer``: an optimizer's step as one fused call, or as few over all weights."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch.optim import Optimizer

from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused.choices import Choice, Choices
from hydroslurm.integrations.fused.equality import relative
from hydroslurm.integrations.fused.rewriters import NotRewritten, first_line
from hydroslurm.integrations.fused.trial import seeded, time_ratio

LEAST_SPEEDUP = 1.05
_WAYS = ("fused", "foreach")
_STEPS = 3
_MOST_ULPS = 64


def optimize_optimizer(optimizer: Optimizer, *, dry_run: bool = False) -> Choices:
    """Let an optimizer of PyTorch's use its ``fused=True`` or ``foreach=True``, where that is equal
    and faster. It is tried on a copy of the weights, with made-up gradients.

    The optimizer stays the object that it is. The choice is part of its ``state_dict()``, so that a
    resumed run goes on with the choice of its first attempt.

    Args:
        dry_run: compare and time, and change nothing.

    Returns:
        One row for each way. Its text is a table.

    Raises:
        UsageError: not an optimizer.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimize_optimizer({type(optimizer).__name__}): wanted an optimizer")
    rows = [_tried(optimizer, way) for way in _WAYS if _has(optimizer, way)]
    best = max(rows, key=lambda row: row.speedup or 0.0, default=None)
    if best is None:
        return Choices([_row(optimizer, reason="it has neither fused nor foreach")])
    if not best.reason and not dry_run:
        _use(optimizer, best.replacement.partition("=")[0])
    for number, row in enumerate(rows):
        if row is best and not row.reason:
            rows[number] = replace(row, applied=not dry_run, reason="dry run" if dry_run else "")
        elif not row.reason:
            rows[number] = replace(row, reason="slower than the other")
    return Choices(rows)


def _has(optimizer: Optimizer, way: str) -> bool:
    return type(optimizer).__module__.startswith("torch.optim") and all(
        way in group for group in optimizer.param_groups
    )


def _row(
    optimizer: Optimizer,
    replacement: str = "",
    speedup: float | None = None,
    difference: float | None = None,
    *,
    reason: str = "",
) -> Choice:
    kind = type(optimizer).__name__
    return Choice(("optimizer",), kind, replacement, speedup, difference, reason=reason)


def _tried(optimizer: Optimizer, way: str) -> Choice:
    """Compared with the optimizer as it is, and timed."""
    name = f"{way}=True"
    if all(group[way] for group in optimizer.param_groups):
        return _row(optimizer, name, reason="in use already")
    try:
        own, new = _copied(optimizer), _copied(optimizer)
        _use(new, way)
        difference = _stepped_alike(own, new)
        speedup = time_ratio(own.step, new.step)
    except NotRewritten as error:
        return _row(optimizer, name, reason=str(error))
    except Exception as error:
        return _row(optimizer, name, reason=first_line(error))
    reason = "" if speedup >= LEAST_SPEEDUP else "not faster"
    return _row(optimizer, name, speedup, difference, reason=reason)


def _copied(optimizer: Optimizer) -> Optimizer:
    """With weights of its own, and gradients that are the same for each copy."""
    made = copy.copy(optimizer)
    vars(made).update(copy.copy(vars(optimizer)))
    for name, value in vars(made).items():
        if name.startswith("_optimizer_") and hasattr(value, "clear"):  # hooks
            setattr(made, name, type(value)())
    own: dict[torch.Tensor, torch.Tensor] = {}
    with seeded():
        for group in optimizer.param_groups:
            for weight in group["params"]:
                own[weight] = weight.detach().clone().requires_grad_(weight.requires_grad)
                if weight.requires_grad:
                    own[weight].grad = torch.randn_like(weight)
    made.param_groups = [
        {**group, "params": [own[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    made.state = copy.copy(optimizer.state)
    made.state.clear()
    for weight, state in optimizer.state.items():
        made.state[own[weight]] = copy.deepcopy(state)
    vars(made).pop("step", None)  # a scheduler has wrapped that of the original
    return made


def _use(optimizer: Optimizer, way: str) -> None:
    """The flags, and what they ask of the state: steps on the device of the weights."""
    for group in optimizer.param_groups:
        group.update({one: one == way for one in _WAYS if one in group})
        for weight in group["params"]:
            step = optimizer.state.get(weight, {}).get("step")
            if isinstance(step, torch.Tensor):
                device = weight.device if way == "fused" else torch.device("cpu")
                if not group.get("capturable"):
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
