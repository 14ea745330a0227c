"""``optimize_modules``: find, compare, time and replace."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused import attention
from hydroslurm.integrations.fused.choices import Choice, Choices, Record
from hydroslurm.integrations.fused.rewriters import NotRewritten, Proposal, proposals_for
from hydroslurm.integrations.fused.swap import Fused, fused_in, kind_of, put, settings, take_out
from hydroslurm.integrations.fused.trial import (
    LEAST_SPEEDUP,
    Call,
    Result,
    Trial,
    run,
    time_ratio,
)
from hydroslurm.training.reporting import notice

__all__ = ["attention", "optimize_modules"]

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")


@dataclass
class _Candidate:
    """A module for which something is proposed, and the first call of it that trains."""

    name: str
    module: nn.Module
    proposals: list[Proposal]
    call: Call | None = None
    like: str = ""

    def capture(self) -> Any:
        """Keep what the module is called with, the first time that it is trained."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.call is None and torch.is_grad_enabled():
                self.call, self.like = Call.of(args, kwargs), repr(kind_of(args, kwargs))

        return self.module.register_forward_pre_hook(before, with_kwargs=True)

    def row(self, **known: Any) -> Choice:
        return Choice((self.name,), type(self.module).__name__, **known)

    @property
    def choice(self) -> tuple[str, str]:
        """What is in place, "" for its own, and for what kind of call: for the record."""
        fused = fused_in(self.module)
        return "" if fused is None else fused.name, self.like

    def put(self, replacement: str) -> bool:
        """Put a proposal in place, if there is one of that name."""
        proposal = next((one for one in self.proposals if one.name == replacement), None)
        if proposal is not None:
            put(self.module, Fused(self.module, proposal, self.like))
        return proposal is not None


def optimize_modules(
    model: nn.Module,
    batch: Any = None,
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
    record: str | os.PathLike[str] | None = None,
) -> Choices:
    """Replace modules by what PyTorch has fused, where it is equal and faster.

    Each is compared on its own part of the batch (outputs, gradients, random numbers, buffers; in
    training and in evaluation) and timed, and keeps its own forward otherwise. The modules stay the
    objects that they are: weights, names in ``state_dict()``, hooks and mode are untouched. A copy
    of the model is fused as well, and a pickle is as it was before. Call it before the model is
    wrapped or compiled, and before the optimizer is made.

    Args:
        batch: a tensor, a tuple of arguments, or a dict of them. Without one, modules are compared
            on the first batch that is trained, and replaced after the first step of an optimizer;
            the result is filled in then, and said in one notice.
        call: calls the model with the batch, where ``model(batch)`` is not right:
            ``lambda model, batch: model.training_step(batch, 0)``.
        record: a folder where each rank keeps what it has chosen, so that the next attempt chooses
            the same; by default in that of the job, if there is one.

    Returns:
        What was replaced, and what was not and why. Its text is a table.

    Raises:
        UsageError: a model that is wrapped or compiled; a file of ``record`` that is not one.
    """
    classes = {kind.__name__ for one in model.modules() for kind in type(one).__mro__}
    if wrapped := sorted(classes.intersection(_WRAPPERS)):
        raise UsageError(
            f"optimize_modules(): the model is wrapped already ({', '.join(wrapped)}); "
            "give the model itself, before it is wrapped"
        )
    kept = Record(record, os.environ)
    candidates, choices = _candidates(model)
    if batch is None:
        _choose_later(candidates, choices, kept)
        return choices
    whole = partial(_run_whole, model, batch, call or _call)
    hooks = [one.capture() for one in candidates]
    try:
        whole()
    finally:
        for hook in hooks:
            hook.remove()
    rows = _choose(candidates, kept)
    if any(row.applied for row in rows):
        rows = _judge(model, whole, candidates, rows, is_known=bool(kept.chosen))
    kept.add({one.name: one.choice for one in candidates})
    choices.add(rows)
    return choices


def _candidates(model: nn.Module) -> tuple[list[_Candidate], Choices]:
    """Those for which something is proposed, and those of a known kind for which nothing can be."""
    found, left = [], Choices()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or fused_in(module) is not None:
            continue
        try:
            proposals = proposals_for(module)
            if proposals and "forward" in vars(module):
                raise NotRewritten("its forward was replaced by somebody else")
        except NotRewritten as error:
            left.add([Choice((name,), type(module).__name__, reason=str(error))])
            continue
        if proposals:
            found.append(_Candidate(name, module, proposals))
    return found, left


def _choose(candidates: list[_Candidate], kept: Record) -> list[Choice]:
    """Compare, and put in place what is equal and faster; modules that are alike are timed once."""
    rows: list[Choice] = []
    timed: dict[Any, Choice] = {}
    for one in candidates:
        if one.call is None:
            rows.append(one.row(reason="not trained with this batch"))
            continue
        key = (type(one.module), settings(one.module), one.like)
        known, _ = kept.chosen.get(one.name, (None, ""))
        row = _decide(one, timed.get(key), known)
        timed.setdefault(key, row)
        if row.applied:
            one.put(row.replacement)
        rows.append(row)
    return rows


def _decide(one: _Candidate, alike: Choice | None, known: str | None) -> Choice:
    """What to do with a module.

    Args:
        alike: the choice for one that takes the same time. known: that of an earlier attempt.
    """
    if known == "":
        return one.row(reason="its own was chosen before")
    if known is None and alike is not None and not alike.applied:
        return replace(alike, names=(one.name,))
    wanted = known or (alike.replacement if alike else "")
    equal: list[Choice] = []
    reasons: list[str] = []
    assert one.call is not None
    trial = Trial(one.module, one.call)
    for proposal in one.proposals:
        if wanted and proposal.name != wanted:
            continue
        try:
            difference = trial.difference(proposal.forward, known=alike is not None)
            gain = alike.speedup if alike else None
            if not wanted:
                gain = trial.speedup(proposal, one.like)
        except NotRewritten as error:
            reasons.append(str(error))
            continue
        equal.append(one.row(replacement=proposal.name, speedup=gain, difference=difference))
    if not equal:
        of_all = f"none of {len(reasons)} fused forms is equal"
        return one.row(reason=reasons[0] if len(set(reasons)) == 1 else of_all)
    best = max(equal, key=lambda row: row.speedup or 0.0)
    is_faster = bool(wanted) or (best.speedup or 0.0) >= LEAST_SPEEDUP
    return replace(best, applied=is_faster, reason="" if is_faster else "not faster")


def _judge(
    model: nn.Module,
    whole: Callable[[], Result],
    candidates: list[_Candidate],
    rows: list[Choice],
    *,
    is_known: bool,
) -> list[Choice]:
    """Take all out again, unless the model as a whole is equal and no slower with them."""
    in_place = [(one.module, fused) for one in candidates if (fused := fused_in(one.module))]

    def switch(on: bool) -> None:
        for module, fused in in_place:
            if on:
                put(module, fused)
            else:
                take_out(module)

    def step(on: bool) -> Result:
        switch(on)
        return whole()

    own = step(False)
    difference = own.difference(step(True))
    devices = {one.device.type for one in own.outputs}
    used = [one.dtype for one in own.outputs if one.is_floating_point()]
    used += [torch.get_autocast_dtype(one) for one in devices if torch.is_autocast_enabled(one)]
    allowed = max((torch.finfo(one).eps ** 0.5 for one in used), default=0.0)
    speedup = time_ratio(partial(step, False), partial(step, True))
    reason = "" if is_known or speedup >= 1.0 else "not faster"
    if difference > allowed:
        reason = f"the model's result differs by more than {allowed:.0e}"
    switch(not reason)
    if reason:
        in_model = f"{reason} in the model"
        rows = [replace(row, applied=False, reason=row.reason or in_model) for row in rows]
    kind, name = type(model).__name__, "all of these"
    return [*rows, Choice(("",), kind, name, speedup, difference, not reason, reason)]


def _run_whole(model: nn.Module, batch: Any, call: Callable[[nn.Module, Any], Any]) -> Result:
    """Run the model on the batch, and change nothing of it: gradients are not accumulated, buffers
    and random numbers are put back."""
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    try:
        trained = [one for one in model.parameters() if one.requires_grad]
        return run(lambda: call(model, batch), trained)
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(**batch) if isinstance(batch, dict) else model(batch)


def _choose_later(candidates: list[_Candidate], choices: Choices, kept: Record) -> None:
    """Without a batch: what an earlier attempt has chosen is put in place at once, all else after
    the first step of an optimizer. Not before, because what is recomputed in a backward has to be
    what was computed, and not within a forward, because the caller may have it under hooks.
    """
    left = [one for one in candidates if one.name not in kept.chosen]
    for one in candidates:
        if one.name in kept.chosen:
            known, one.like = kept.chosen[one.name]
            is_put = one.put(known)
            reason = "" if is_put else "its own was chosen before"
            choices.add([one.row(replacement=known, applied=is_put, reason=reason)])

    def say() -> None:
        notice(f"modules, and what PyTorch has fused in their place:\n{choices}")

    def after_step(*_: Any) -> None:
        if any(one.call for one in left):  # else it is the step of another model
            for hook in hooks:
                hook.remove()
            choices.add(_choose(left, kept))
            kept.add({one.name: one.choice for one in left})
            say()

    if left:
        hooks = [one.capture() for one in left]
        hooks.append(register_optimizer_step_post_hook(after_step))
    elif choices.rows:
        say()
