"""``optimize_modules``: find, compare, time and replace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused import activations, attention, norms
from hydroslurm.integrations.fused.choices import Choice, Choices, Record
from hydroslurm.integrations.fused.rewriters import NotRewritten, Proposal, proposals_for
from hydroslurm.integrations.fused.swap import Fused, fused_in, kind_of, put, settings, take_out
from hydroslurm.integrations.fused.trial import Call, Trial
from hydroslurm.integrations.fused.whole import (
    CHANNELS_LAST,
    MEMORY_FORMAT,
    Whole,
    channels_last,
    try_together,
)
from hydroslurm.training.reporting import notice

__all__ = ["activations", "attention", "norms", "optimize_modules"]

LEAST_SPEEDUP = 1.05
"""What is less may be noise."""
LEAST_TOGETHER = 1.0
"""Of the model as a whole."""
_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")


@dataclass
class _Candidate:
    name: str
    module: nn.Module
    proposals: list[Proposal]
    call: Call | None = None
    like: str = ""


def optimize_modules(
    model: nn.Module,
    batch: Any = None,
    *,
    call: Callable[[nn.Module, Any], Any] | None = None,
    dry_run: bool = False,
    record: str | os.PathLike[str] | None = None,
) -> Choices:
    """Replace modules by what PyTorch has fused, where it is equal and faster.

    Each is compared on its own part of the batch (outputs, gradients, random numbers, buffers; in
    training and in evaluation) and timed, and keeps its own forward otherwise. The modules stay the
    objects that they are: weights, names in ``state_dict()``, hooks and mode are untouched, and a
    copy or a pickle of the model is as it was before. Call it before the model is wrapped or
    compiled, and before the optimizer is made.

    Args:
        batch: a tensor, a tuple of arguments, or a dict of them. Without one, modules are compared
            on the first batch that is trained, and replaced behind the first step of an optimizer;
            the result is filled in then, and said in one notice.
        call: calls the model with the batch, where ``model(batch)`` is not right:
            ``lambda model, batch: model.training_step(batch, 0)``.
        dry_run: compare and time, and replace nothing.
        record: a folder where each rank keeps what it has chosen, so that the next attempt chooses
            the same; by default in that of the job, if there is one.

    Returns:
        What was replaced, and what was not and why. Its text is a table.

    Raises:
        UsageError: a model that is wrapped or compiled; a file of ``record`` that is not one.
    """
    wrapped = {type(one).__name__ for one in model.modules() if _is_wrapper(one)}
    if wrapped:
        raise UsageError(
            f"optimize_modules(): the model is wrapped already ({', '.join(sorted(wrapped))}); "
            "give the model itself, before it is wrapped"
        )
    kept = Record(None, {}) if dry_run else Record(record, os.environ)
    candidates, choices = _candidates(model)
    if batch is None:
        _Later(candidates, choices, kept, dry_run=dry_run)
        return choices
    whole = Whole(model, batch, call)
    with _capturing(candidates):
        whole.run()
    chosen, fused = _choose(candidates, kept)
    if fused:
        chosen = _judge(whole, chosen, fused, known=kept.get(fused[0][0].name) is not None)
    chosen += _lay_out(whole, kept, dry_run=dry_run)
    choices.rows = [*chosen, *choices.rows]
    if dry_run:
        _switch(fused)(False)
        choices.rows = [_undone(row) for row in choices.rows]
    else:
        _keep(kept, candidates)
    return choices


def _is_wrapper(module: nn.Module) -> bool:
    return any(one.__name__ in _WRAPPERS for one in type(module).__mro__)


def _candidates(model: nn.Module) -> tuple[list[_Candidate], Choices]:
    """Those for which something is proposed, and those of a known kind for which nothing can be."""
    found: list[_Candidate] = []
    left = Choices()
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or fused_in(module) is not None:
            continue
        try:
            proposals = proposals_for(module)
            if proposals and "forward" in vars(module):
                raise NotRewritten("its forward was replaced by somebody else")
        except NotRewritten as error:
            left.rows.append(Choice((name,), type(module).__name__, reason=str(error)))
            continue
        if proposals:
            found.append(_Candidate(name, module, proposals))
    left.rows = _merged(left.rows)
    return found, left


@contextmanager
def _capturing(candidates: list[_Candidate]) -> Iterator[None]:
    hooks = [_capture(candidate) for candidate in candidates]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _capture(candidate: _Candidate) -> Any:
    """Keep what the module is called with, the first time that it is trained."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        if candidate.call is None and torch.is_grad_enabled():
            candidate.call = Call.of(args, kwargs)
            candidate.like = repr(kind_of(args, kwargs))

    return candidate.module.register_forward_pre_hook(before, with_kwargs=True)


def _choose(
    candidates: list[_Candidate], kept: Record
) -> tuple[list[Choice], list[tuple[_Candidate, Fused]]]:
    """For each module; those that are alike are timed once."""
    rows: list[Choice] = []
    fused: list[tuple[_Candidate, Fused]] = []
    timed: dict[Any, Choice] = {}
    for one in candidates:
        if one.call is None:
            rows.append(_row(one, reason="not trained with this batch"))
            continue
        known = kept.get(one.name)
        alike = (type(one.module), settings(one.module), one.like, one.call.shapes)
        choice = _decide(one, timed.get(alike), known and known[0])
        timed.setdefault(alike, choice)
        rows.append(choice)
        if choice.applied:
            proposal = next(p for p in one.proposals if p.name == choice.replacement)
            fused.append((one, Fused(one.module, proposal, one.like)))
    return _merged(rows), fused


def _decide(one: _Candidate, alike: Choice | None, known: str | None) -> Choice:
    """What to do with a module.

    Args:
        alike: the choice for one that takes the same time. known: that of an earlier attempt.
    """
    if known == "":
        return _row(one, reason="its own was chosen before")
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
        equal.append(_row(one, proposal.name, gain, difference))
    if not equal:
        reason = reasons[0] if len(reasons) == 1 else f"none of {len(reasons)} fused forms is equal"
        return _row(one, reason=reason)
    best = max(equal, key=lambda row: row.speedup or 0.0)
    is_faster = bool(wanted) or (best.speedup or 0.0) >= LEAST_SPEEDUP
    return replace(best, applied=is_faster, reason="" if is_faster else "not faster")


def _row(
    one: _Candidate,
    replacement: str = "",
    speedup: float | None = None,
    difference: float | None = None,
    *,
    reason: str = "",
) -> Choice:
    kind = type(one.module).__name__
    return Choice((one.name,), kind, replacement, speedup, difference, reason=reason)


def _merged(rows: list[Choice]) -> list[Choice]:
    """One row for modules that are alike."""
    made: dict[Any, Choice] = {}
    for row in rows:
        key = (row.kind, row.replacement, row.applied, row.reason, row.speedup)
        if (first := made.get(key)) is not None:
            largest = max((first.difference or 0.0, row.difference or 0.0))
            difference = None if row.difference is None else largest
            row = replace(first, names=(*first.names, *row.names), difference=difference)
        made[key] = row
    return list(made.values())


def _switch(fused: list[tuple[_Candidate, Fused]]) -> Callable[[bool], None]:
    def switch(on: bool) -> None:
        for candidate, one in fused:
            if on and fused_in(candidate.module) is None:
                put(candidate.module, one)
            elif not on and fused_in(candidate.module) is not None:
                take_out(candidate.module)

    return switch


def _judge(
    whole: Whole, rows: list[Choice], fused: list[tuple[_Candidate, Fused]], *, known: bool
) -> list[Choice]:
    """Put them in place, unless the model as a whole is not better with them."""
    least = 0.0 if known else LEAST_TOGETHER
    together = try_together(whole, _switch(fused), names="all of these", least=least)
    if not together.applied:
        reason = f"{together.reason} in the model"
        rows = [replace(row, applied=False, reason=row.reason or reason) for row in rows]
    return [*rows, together]


def _lay_out(whole: Whole, kept: Record, *, dry_run: bool) -> list[Choice]:
    switch, known = channels_last(whole.model), kept.get(MEMORY_FORMAT)
    if switch is None or (known is not None and not known[0]):
        return []
    choice = try_together(whole, switch, names=CHANNELS_LAST, least=0.0 if known else LEAST_SPEEDUP)
    if dry_run:
        switch(False)
    kept.add({MEMORY_FORMAT: (CHANNELS_LAST if choice.applied else "", "")})
    return [choice]


def _undone(row: Choice) -> Choice:
    return replace(row, applied=False, reason=row.reason or "dry run")


def _keep(kept: Record, candidates: list[_Candidate]) -> None:
    """What is in place now, and what is not."""
    chosen = {}
    for one in candidates:
        found = fused_in(one.module)
        chosen[one.name] = (found.name, one.like) if found is not None else ("", one.like)
    kept.add(chosen)


class _Later:
    """Without a batch: what an earlier attempt has chosen is put in place at once, all else behind
    the first step of an optimizer. Not before, because what is recomputed in a backward has to be
    what was computed, and not within a forward, because the caller may have it under hooks.
    """

    def __init__(
        self, candidates: list[_Candidate], choices: Choices, kept: Record, *, dry_run: bool
    ) -> None:
        self._choices, self._kept, self._dry_run = choices, kept, dry_run
        self._candidates = [one for one in candidates if kept.get(one.name) is None]
        for one in candidates:
            if (known := kept.get(one.name)) is not None:
                choices.rows.append(_put_known(one, *known))
        if self._candidates:
            self._hooks = [_capture(one) for one in self._candidates]
            self._hooks.append(register_optimizer_step_post_hook(self._after_step))
        elif choices.rows:
            self._say()

    def _after_step(self, *_: Any) -> None:
        if not any(one.call for one in self._candidates):
            return  # that of another model
        for hook in self._hooks:
            hook.remove()
        rows, fused = _choose(self._candidates, self._kept)
        if self._dry_run:
            rows = [_undone(row) for row in rows]
        else:
            _switch(fused)(True)
            _keep(self._kept, self._candidates)
        self._choices.rows = [*rows, *self._choices.rows]
        self._say()

    def _say(self) -> None:
        notice(f"modules, and what PyTorch has fused in their place:\n{self._choices}")


def _put_known(one: _Candidate, replacement: str, like: str) -> Choice:
    proposal = next((p for p in one.proposals if p.name == replacement), None)
    if proposal is None:
        return _row(one, reason="its own was chosen before")
    put(one.module, Fused(one.module, proposal, like))
    return replace(_row(one, proposal.name, reason=""), applied=True)
