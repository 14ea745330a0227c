"""``optimize_modules``: find, compare, time and replace; and what was replaced, what was not and
why: a table for people, a file for the next attempt.

Which of two equal forwards is the faster one is measured, and may come out otherwise the next time;
their results differ in the last bit. So each rank keeps what it has chosen, and a resumed run is
the undisturbed one.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hydroslurm.checkpoint import rng
from hydroslurm.coordination.world import World
from hydroslurm.core import rundir
from hydroslurm.core.decoding import decode
from hydroslurm.core.files import read_regular, write_atomically
from hydroslurm.errors import UsageError
from hydroslurm.integrations.fused.rewriters import (
    NotRewritten,
    Proposal,
    first_line,
    proposals_for,
)
from hydroslurm.integrations.fused.trial import (
    LEAST_SPEEDUP,
    PLAIN,
    Call,
    Fused,
    Trial,
    fused_in,
    kind_of,
    put,
    relative,
    seeded,
    settings,
    time_ratio,
)
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.claim import run_directory
from hydroslurm.training.rank_group import notice

_WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "OptimizedModule")


_OF_MODULE = frozenset(vars(nn.Module()))


@dataclass(eq=False)
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

    def put(self, replacement: str) -> bool:
        """Put a proposal in place, if there is one of that name."""
        proposal = next((one for one in self.proposals if one.name == replacement), None)
        if proposal is not None:
            put(self.module, Fused(self.module, proposal, self.like))
        return proposal is not None

    def alike(self) -> object:
        """Equal for modules that are given the same and calculate the same with it."""
        own = {name: value for name, value in vars(self.module).items() if name not in _OF_MODULE}
        others = tuple((name, id(one)) for name, one in own.items() if type(one) not in PLAIN)
        inner = tuple((type(one), settings(one)) for one in self.module.modules())
        return inner, others, self.like


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
    path = record_of(record, os.environ)
    chosen = read_record(path)
    candidates, choices = _candidates(model)

    def choose(among: list[_Candidate]) -> None:
        choices.rows[:0] = _choose(among, chosen)
        names = {one: fused.name for one in among if (fused := fused_in(one.module)) is not None}
        chosen.update((one.name, Chosen(names.get(one, ""), one.like)) for one in among)
        write_record(path, chosen)

    if batch is None:
        _choose_later(candidates, choices, chosen, choose)
        return choices
    hooks = [one.capture() for one in candidates]
    buffers = [(one, one.detach().clone()) for one in model.buffers()]
    numbers = rng.capture()
    try:
        with torch.enable_grad():
            (call or _call)(model, batch)
    finally:
        rng.restore(numbers)
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
    choose(candidates)
    return choices


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(**batch) if isinstance(batch, dict) else model(batch)


def _candidates(model: nn.Module) -> tuple[list[_Candidate], Choices]:
    """Those for which something is proposed, and those of a known kind for which nothing can be."""
    found: list[_Candidate] = []
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) or fused_in(module) is not None:
            continue
        try:
            proposals = proposals_for(module)
            if proposals and "forward" in vars(module):
                raise NotRewritten("its forward was replaced by somebody else")
        except NotRewritten as error:
            reasons.setdefault((type(module).__name__, str(error)), []).append(name)
            continue
        if proposals:
            found.append(_Candidate(name, module, proposals))
    left = [Choice(tuple(names), kind, reason=why) for (kind, why), names in reasons.items()]
    return found, Choices(left)


def _choose(candidates: list[_Candidate], chosen: dict[str, Chosen]) -> list[Choice]:
    """Compare, and put in place what is equal and faster: one of several modules that are alike."""
    groups: dict[object, list[_Candidate]] = {}
    for one in candidates:
        groups.setdefault(one.alike(), []).append(one)
    rows = []
    for group in groups.values():
        known = chosen.get(group[0].name)
        row = _decide(group[0], None if known is None else known.replacement)
        rows.append(replace(row, names=tuple(one.name for one in group)))
        for one in group if row.applied else ():
            one.put(row.replacement)
    return rows


def _decide(one: _Candidate, known: str | None) -> Choice:
    """What to do with a module.

    Args:
        known: the choice of an earlier attempt.
    """
    row = Choice((one.name,), type(one.module).__name__)
    if one.call is None:
        return replace(row, reason="not trained with this batch")
    if known == "":
        return replace(row, reason="its own was chosen before")
    equal: list[Choice] = []
    reasons: list[str] = []
    trial = Trial(one.module, one.call)
    for proposal in one.proposals:
        if known and proposal.name != known:
            continue
        try:
            difference = trial.difference(proposal.forward)
            speedup = None if known else trial.speedup(proposal, one.like)
        except NotRewritten as error:
            reasons.append(str(error))
            continue
        equal.append(
            replace(row, replacement=proposal.name, speedup=speedup, difference=difference)
        )
    if not equal:
        of_all = f"none of {len(reasons)} fused forms is equal"
        return replace(row, reason=reasons[0] if len(set(reasons)) == 1 else of_all)
    best = max(equal, key=lambda row: row.speedup or 0.0)
    is_faster = bool(known) or (best.speedup or 0.0) >= LEAST_SPEEDUP
    return replace(best, applied=is_faster, reason="" if is_faster else "not faster")


def _choose_later(
    candidates: list[_Candidate],
    choices: Choices,
    chosen: dict[str, Chosen],
    choose: Callable[[list[_Candidate]], None],
) -> None:
    """Without a batch: what an earlier attempt has chosen is put in place at once, all else after
    the first step of an optimizer. Not before, because what is recomputed in a backward has to be
    what was computed, and not within a forward, because the caller may have it under hooks.
    """
    left = [one for one in candidates if one.name not in chosen]
    names: dict[tuple[str, str, bool], list[str]] = {}
    for one in candidates:
        if (known := chosen.get(one.name)) is not None:
            one.like = known.like
            key = type(one.module).__name__, known.replacement, one.put(known.replacement)
            names.setdefault(key, []).append(one.name)
    for (kind, replacement, is_put), alike in names.items():
        reason = "" if is_put else "its own was chosen before"
        row = Choice(tuple(alike), kind, replacement, applied=is_put, reason=reason)
        choices.rows.append(row)

    def say() -> None:
        notice(f"modules, and what PyTorch has fused in their place:\n{choices}")

    def after_step(*_: Any) -> None:
        if any(one.call for one in left):  # else it is the step of another model
            for hook in hooks:
                hook.remove()
            choose(left)
            say()

    if left:
        hooks = [one.capture() for one in left]
        hooks.append(register_optimizer_step_post_hook(after_step))
    elif choices.rows:
        say()


# --- optimizers
# ------------------------------------------------------------------------------------------------

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


_HEAD = ("what", "in its place", "speed", "largest difference", "")
_LIMIT_BYTES = 1 << 24


@dataclass(frozen=True)
class Choice:
    """About one module, or about several that are alike.

    Attributes:
        names: in the model. kind: the class.
        replacement: what would be in its place; empty if nothing is proposed.
        speedup: time of a forward and a backward of its own over that of the replacement.
        difference: the largest, of outputs and gradients, relative to the largest value of the
            same tensor.
        applied: whether it is in place. reason: why not.
    """

    names: tuple[str, ...]
    kind: str
    replacement: str = ""
    speedup: float | None = None
    difference: float | None = None
    applied: bool = False
    reason: str = ""

    def cells(self) -> tuple[str, ...]:
        """Of the table; ``blocks.0.norm`` and ``blocks.1.norm`` are ``blocks.*.norm x2``."""
        shapes = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in self.names))
        names = f"{shapes[0]}{', ...' if len(shapes) > 1 else ''} x{len(self.names)}"
        if len(self.names) == 1:
            names = self.names[0] or "the model"
        return (
            f"{names} ({self.kind})",
            self.replacement or "-",
            f"{self.speedup:.2f}x" if self.speedup is not None else "-",
            f"{self.difference:.1e}" if self.difference is not None else "-",
            "replaced" if self.applied else self.reason,
        )


@dataclass
class Choices:
    """All of them; ``print()`` shows a table."""

    rows: list[Choice] = field(default_factory=list)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.rows)

    @property
    def applied(self) -> list[Choice]:
        return [row for row in self.rows if row.applied]

    def __str__(self) -> str:
        if not self.rows:
            return "nothing that a rewriter knows"
        lines = [_HEAD, *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        padded = ([c.ljust(w) for c, w in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)


@dataclass(frozen=True)
class Chosen:
    """What is in place of a module's forward, "" for its own, and for what kind of call."""

    replacement: str
    like: str


def record_of(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Path | None:
    """The file of this rank's choices: in the folder that is given, else in that of the job, if
    there is one. Whoever can write it can only choose among forms that are equal, and are compared
    again where there is a batch."""
    rank = World.from_environ(environ).rank
    if given is not None:
        return Path(given).absolute() / f"rank-{rank:05d}.json"
    if rundir.named_in(environ) or Allocation.from_environ(environ) is not None:
        return run_directory(None, environ).fused(rank)
    return None


def read_record(path: Path | None) -> dict[str, Chosen]:
    """What an earlier attempt has chosen, by the module's name.

    Raises:
        UsageError: what lies there is no such file.
    """
    if path is None or not path.exists():
        return {}
    try:
        return decode(dict[str, Chosen], read_regular(path, limit_bytes=_LIMIT_BYTES))
    except ValueError as error:
        raise UsageError(
            f"{path} does not say which modules of this run were replaced ({error}). Remove it to "
            "have them chosen anew"
        ) from error


def write_record(path: Path | None, chosen: Mapping[str, Chosen]) -> None:
    """Keep all that is chosen by now."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        made = {name: asdict(one) for name, one in chosen.items()}
        write_atomically(path, json.dumps(made, indent=1))
