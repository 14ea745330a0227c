"""What changes from step to step in the objects of a script, found by one walk from its roots: the
generator of a collate function, the temperature of a data set, a meter, the best loss so far. What
differs from before the training is saved, put back by its path in the next attempt, or named.

Nothing is unpickled: a path leads to an object that the script has made again, and a value is put
there. An enum's member and a named tuple are made of the class that the script has by then: nothing
is imported or called.
"""

from __future__ import annotations

import copy
import datetime
import enum
import functools
import itertools
import os
import pathlib
import types
import weakref
from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.walk import (
    ARRAYS,
    FLAT,
    KNOWN,
    MANY,
    NONE,
    Node,
    Variables,
    Walk,
    class_at,
    form_of,
    is_flat,
    is_iterator,
    is_tagged,
    like,
    tensors_in,
)
from hydroslurm.errors import StateMismatch

_GROWING = (dict, list, deque, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MUTABLE = (list, deque, set, Counter, np.ndarray, bytearray, array)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_LOST = "has changed and cannot be saved: the next attempt begins without that"
MOVED = "is an iterator that has moved, and nothing can bring it back to its place"
_MADE = "says that {} is there, which the next attempt has to make again: it is not saved"
Roots = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
OF_PROCESS = (float, str, pathlib.PurePath, datetime.date, datetime.time)
"""Numbers of seconds, texts, paths and times may be of the process that has set them."""


class Unkept(NamedTuple):
    """State that has changed and that no value can bring back: its path as a person writes it, the
    name of its class, and half a sentence."""

    path: str
    kind: str
    why: str

    def __str__(self) -> str:
        return f"{shown(self.path)} ({self.kind}) {self.why}"


@dataclass
class _Past:
    """What is known of one path since :meth:`Census.note`, by the names of its entries."""

    noted: dict[Any, Any] | None = None  # by what it is seen whether values have changed
    same: dict[Any, Callable[[], Any]] = field(default_factory=dict)  # what these were
    objects: Set[Any] = frozenset()  # that were there when the first step began
    begun: dict[Any, Any] = field(default_factory=dict)  # what had changed by the first step
    restored: set[Any] = field(default_factory=set)
    late: set[Any] = field(default_factory=set)  # of these, what was first set in a step
    left_out: set[Any] = field(default_factory=set)  # from what is saved

    def note(self, node: Node, values: Mapping[Any, Any]) -> None:
        if self.noted is None:
            self.noted, self.objects = _noted(node, values), set(node.objects)
            self.same = {k: _reference(v) for k, v in values.items() if type(v) not in FLAT}
        self.noted.update(
            _noted(node, node.objects.keys() & node.values.keys() - self.noted.keys())
        )


@dataclass
class Census:
    """What is reached from some roots, and what of it has changed since :meth:`note`. Roots and
    models are given by name, or as what makes them anew at each look."""

    roots: Roots
    models: Roots = field(default_factory=dict)  # whose weights and buffers a state_dict() has
    all_buffers: bool = False  # also those that it has, which may be another rank's
    saved: Callable[[], Iterable[Any]] = tuple  # by somebody else, with all that hangs in it
    known: Mapping[str, str] = field(default_factory=lambda: KNOWN)  # what is not entered, and why
    without: Mapping[str, Collection[str]] = field(default_factory=dict)  # attributes, by the root
    device: Callable[[], torch.device] | None = None  # of tensors that were not on the CPU
    all_generators: bool = False  # also undrawn: one without a seed is another in each attempt
    modes: dict[str, bool] = field(default_factory=dict, init=False)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict, init=False)
    """Those that the last look has come across, which are not entered, by their paths."""

    def __post_init__(self) -> None:
        self._past = defaultdict[str, _Past](_Past)
        self._told: set[tuple[str, str]] = set()
        self._lost: list[Unkept] = []

    def note(self) -> None:
        """What does not differ from now on is as the script makes it. Called again it notes only
        objects that it has not seen, such as the variables of a second loop."""
        for node, past in self._look():
            past.note(node, node.values)

    def begin(self) -> None:
        """The first step comes next. What the script has set since :meth:`note`, and leaves alone
        from now on, may be of this process: a time, a folder, its rank."""
        for node, past in self._look():
            # a copy of weights that a hook has made: the next attempt copies others
            past.note(node, {} if isinstance(node.thing, nn.Module) else node.values)
            past.begun = _noted(node, node.values.keys() - _same(node, past.noted or {}))
            past.objects = set(node.objects)

    def state(self) -> dict[str, Any]:
        """All values that have changed, by the path of the object that has them."""
        found: dict[str, Any] = {}
        for node, past in self._look():
            changed = list(self._changed(node, past))
            early = _same(node, past.begun) - past.late if changed and past.begun else ()
            for name, value, form in changed:
                copy = form if type(form) in FLAT else copied(form)
                saved = copy, self._marks(node, past, name, value, is_early=name in early)
                found.setdefault(node.path, {})[name] = saved
        return found

    def restore(
        self, state: Mapping[str, Any], *, is_resized: bool = False, new_rank: int | None = None
    ) -> dict[str, Any]:
        """Put saved values back, and return those for which there is no object yet. A time or text
        that was set before the first step, and is set again by now, stays that of this attempt.

        Args:
            is_resized: another number of ranks has saved the state: so does all else that was set
                before the first step.
            new_rank: this one had no part in the save: generators begin streams of their own.
        """
        rest = dict(state)
        with torch.no_grad():
            for node, past in self._look():
                if saved := rest.pop(node.path, {}):
                    past.restored |= saved.keys()
                    past.late = {one for one, (_, marks) in saved.items() if "early" not in marks}
                same = _same(node, past.noted or {}) if saved else set()
                for name, (form, marks) in saved.items():
                    here = node.values.get(name, node.objects.get(name, NONE))
                    is_set = here is not NONE and name not in same
                    is_own = is_resized or isinstance(form, OF_PROCESS)
                    if not ("early" in marks and is_set and is_own):
                        self._restore_one(node, name, here, form, marks, new_rank)
        return rest

    def unkept(self) -> list[Unkept]:
        """What has changed since :meth:`note` and is not saved; each once."""
        for node, past in self._look():
            deque(self._changed(node, past), 0)  # for what is lost
            self._find_flags(node, past)
        return self.take_lost()

    def take_lost(self) -> list[Unkept]:
        """What :meth:`state` has come across since it was asked last."""
        found, self._lost = self._lost, []
        return found

    def _look(self) -> list[tuple[Node, _Past]]:
        with torch._C.DisableTorchFunctionSubclass():
            models = self.models() if callable(self.models) else self.models
            roots = self.roots() if callable(self.roots) else self.roots
            saved = (*self.saved(), *rng.global_generators())  # those by the run
            walk = Walk(
                known=self.known,
                without=self.without,
                all_buffers=self.all_buffers,
                modes=self.modes,
            )
            walk.leave_out(saved)
            walk.go(models, roots)
        self.optimizers = walk.optimizers
        for cut in walk.cuts:
            self.name(*cut)
        return [(node, self._past[path]) for path, node in walk.nodes.items()]

    def name(self, path: str, what: Any, why: str) -> None:
        """What is lost, once."""
        if (path, why) not in self._told:
            self._told.add((path, why))
            self._lost.append(Unkept(path, getattr(what, "__name__", str(what)), why))

    def _changed(self, node: Node, past: _Past) -> Iterator[tuple[Any, Any, Any]]:
        """What is to be saved, by name, with its form. What is lost is named."""
        noted = past.noted or {}
        for name in node.objects.keys() & noted - node.values.keys():
            if not issubclass(kind := type(node.objects[name]), _CODE):
                self.name(node.at(name), kind, _LOST)
        if past.noted is None and not past.restored:
            return  # an object of this attempt: what has it says so
        if isinstance(node.thing, _GROWING):
            gone = noted.keys() - node.values.keys() - node.objects.keys()
            if gone or node.objects.keys() != past.objects:
                self.name(node.path, type(node.thing), _LOST)
        same = _same(node, noted) - past.restored
        for name, value in node.values.items():
            is_drawn = self.all_generators and isinstance(value, rng.KINDS)
            if (name in same and not is_drawn) or name in past.left_out:
                continue
            if (form := _form(node, name)) is not NONE:
                yield name, value, form
            elif name in noted:
                kind = type(value)
                self.name(node.at(name), kind, MOVED if is_iterator(kind) else _LOST)

    def _find_flags(self, node: Node, past: _Past) -> None:
        """Flags that a step has set beside an object that it has made: saved, they would keep the
        next attempt from making it again. They are not saved from now on."""
        new = node.objects.keys() - past.objects
        made = [name for name in new if not issubclass(type(node.objects[name]), _CODE)]
        if past.noted is None or not made or isinstance(node.thing, Variables):
            return
        for name, value in node.values.items():
            if value is True and past.noted.get(name, False) is False:
                past.left_out.add(name)
                self.name(node.at(name), True, _MADE.format(made[0]))

    def _marks(
        self, node: Node, past: _Past, name: Any, value: Any, *, is_early: bool
    ) -> list[str]:
        """What a restore has to know of a value."""
        look = node.looks.get(name)
        tensors = look.tensors if look else []
        if look and look.is_large:
            tensors = tensors_in(value)
        marks = {
            "early": is_early,
            "same object": name in past.same and past.same[name]() is value,
            "buffer": name in node.buffers,
            "parameter": name in node.weights and name not in node.buffers,
            "process": type(value) is int and value == os.getpid() and "pid" in str(name),
            "on device": any(str(one.device) != "cpu" for one in tensors),
        }
        return [mark for mark, holds in marks.items() if holds]

    def _restore_one(
        self, node: Node, name: Any, here: Any, form: Any, marks: Any, new_rank: int | None
    ) -> None:
        if "process" in marks:  # whoever compares it makes anew what another process has made
            form = os.getpid()
        device = self.device() if self.device and "on device" in marks else None
        # who else has the same list sees what is in it; one that took its place is new
        into = here if "same object" in marks else apart(here)
        made = put(None if into is NONE else into, form, device=device)
        if new_rank is not None and isinstance(made, rng.KINDS):
            rng.diverge(made, new_rank)
        if "buffer" in marks and name not in node.buffers:
            node.thing._non_persistent_buffers_set.add(name)
            node.thing._buffers[name] = made
        elif "parameter" in marks and name not in node.weights:
            _add_parameter(node.thing, name, nn.Parameter(made, made.is_floating_point()))
        elif made is not here:
            node.put(name, made)
        if name == "training":
            self.modes[node.path] = made


def _form(node: Node, name: Any) -> Any:
    """What is saved of a value."""
    value, look = node.values[name], node.looks.get(name)
    if node.is_fixed(value):
        return NONE
    if look is None:
        return value
    return form_of(value) if look.is_large else look.form


def _noted(node: Node, names: Iterable[Any]) -> dict[Any, Any]:
    """A copy of what shows whether these values have changed."""
    found = {name: (node.values[name], node.looks.get(name)) for name in names}
    return {k: v if one is None else copied(one.mark) for k, (v, one) in found.items()}


def _same(node: Node, noted: Mapping[Any, Any]) -> set[Any]:
    """The names of the values that are as they were noted."""
    flat = {
        name
        for name, value in node.values.items()
        if name not in node.looks and _is_same(value, noted.get(name, NONE))
    }
    marks = {name: one.mark for name, one in node.looks.items() if name in node.values}
    return flat | (marks.keys() - differing(marks, noted) if marks else set())


def _reference(value: Any) -> Callable[[], Any]:
    return weakref.ref(value) if isinstance(value, ARRAYS) else lambda: value


def _is_same(value: Any, before: Any) -> bool:
    """Of two FLAT values."""
    return type(before) is type(value) and (before is value or bool(before == value))


def shown(path: str) -> str:
    """Without the function whose variable the path begins with."""
    return path.rpartition("().")[2]


def _add_parameter(module: Any, name: str, made: nn.Parameter) -> None:
    """One that the script adds while it trains. torch's containers count theirs themselves."""
    if isinstance(module, nn.ParameterList):
        module.append(made)
    elif isinstance(module, nn.ParameterDict):
        module[name] = made
    else:
        module.register_parameter(name, made)


# --- forms: compared, copied, put back
# ------------------------------------------------------------------------------------------------


def differing(marks: Mapping[Any, Any], before: Mapping[Any, Any]) -> set[Any]:
    """The names whose marks are not what they were."""
    return {
        name
        for name, mark in marks.items()
        if (was := before.get(name, NONE)) is NONE or not equal(mark, was)
    }


def equal(one: Any, other: Any) -> bool:
    """Of two forms."""
    (ours, tree), (theirs, other_tree) = (tree_flatten(it, is_leaf=is_flat) for it in (one, other))
    return tree == other_tree and all(map(_equal_leaves, ours, theirs))


def _equal_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_like = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return is_like and torch.equal(one, other)
    return type(one) is type(other) and bool(
        np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
    )


def copied(value: Any) -> Any:
    """A copy of tensors, numbers and containers."""
    return tree_map(_copy_of_leaf, value, is_leaf=is_flat)


def _copy_of_leaf(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _MUTABLE) else value


def put(here: Any, value: Any, *, device: torch.device | None) -> Any:
    """The saved value in the place of what is here: in the same containers, the same tensor.

    Args:
        device: for tensors that are not here yet.

    Raises:
        StateMismatch: the script has no such class any more.
    """
    if isinstance(value, torch.Tensor):
        if _is_trained(here) and here.shape == value.shape:
            here.detach().copy_(value)  # an optimizer has it
            return here
        if not isinstance(here, torch.Tensor):
            return value if device is None else value.to(device)
        if here.shape == value.shape and here.dtype == value.dtype and not here.requires_grad:
            return here.copy_(value)
        return value.to(here.device)
    if is_tagged(value):
        return _made(here, value[1], value[2], device)
    if isinstance(value, Mapping):
        into = here if isinstance(here, dict) else like(value, {})
        # a key that is not here yet has what a defaultdict makes for it, such as a bounded deque
        make = getattr(here, "default_factory", None) if isinstance(here, defaultdict) else None
        made = {}
        for form, one in value.items():
            key = put(None, form, device=None)
            made[key] = put(into[key] if key in into else make and make(), one, device=device)
        into.clear()
        into.update(made)
        return into
    if isinstance(value, MANY) and not isinstance(value, torch.Size):
        is_same = isinstance(here, (list, tuple, deque)) and not isinstance(value, (set, frozenset))
        there = list(here) if is_same and len(here) == len(value) else [None] * len(value)
        entries = [
            put(one if _is_trained(one) else None, saved, device=device)
            for one, saved in zip(there, value, strict=True)
        ]
        if type(here) is type(value) and isinstance(here, (list, deque, set)):
            here.clear()
            (here.update if isinstance(here, set) else here.extend)(entries)
            return here
        return like(here if is_same else value, entries)
    return value


def _is_trained(here: Any) -> bool:
    """Whether an optimizer may have it, so that it has to stay."""
    return isinstance(here, torch.Tensor) and here.requires_grad and here.is_leaf


def apart(here: Any) -> Any:
    """For a value that is not to be put into what is here."""
    if isinstance(here, torch.Tensor):
        return here if _is_trained(here) or type(here) is torch.nn.Parameter else None
    return copy.copy(here) if isinstance(here, (dict, *MANY)) else here


def _made(here: Any, name: str, body: Any, device: torch.device | None) -> Any:
    """The value that a tagged form is of."""
    if name == "count":
        return itertools.count(*body)
    if name == "generator":
        if not isinstance(here, rng.KINDS):
            return rng.made_from(*body)
        rng.set_state(here, body[1])
        return here
    kind = class_at(body[0])
    if name == "enum" and isinstance(kind, enum.EnumMeta):
        if (member := vars(kind)["_member_map_"].get(body[1])) is not None:
            return member
    elif name == "named tuple" and isinstance(kind, type) and issubclass(kind, tuple):
        there = here if type(here) is kind and len(here) == len(body[1]) else (None,) * len(body[1])
        return tuple.__new__(kind, map(functools.partial(put, device=device), there, body[1]))
    raise StateMismatch(
        f"what was saved is of {body[0].replace(':', '.')} ({name}), and this script has no such "
        "class, or no such member of it: give it back, or begin a new run"
    )
