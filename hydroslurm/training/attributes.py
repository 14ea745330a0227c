"""What an object of a script counts and collects in its attributes, as a value to be saved.

Frameworks save what is in a ``state_dict()``. Much else lives from one step to the next: the
outputs of an epoch in a list, a running mean, the moment at which the epoch began.
"""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hydroslurm.checkpoint.plain import (
    MANY,
    SIMPLE,
    equal,
    form_of,
    is_dense,
    is_plain,
    plain,
    put,
    tensors_in,
)

_NONE = object()
_LARGE, _LARGE_BYTES = 10_000, 2**20
_LIBRARIES = (
    "torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "transformers", "trl",
    "peft", "accelerate", "hydroslurm",
)  # fmt: skip


class Attributes:
    """The attributes of one object that hold numbers or tensors, or containers of them, as far as
    they have changed since :meth:`remember`.

    Args:
        without: names that are left out.
        flags: whether also those that hold a bool, a string or None.
        tensors: whether also those that hold tensors or arrays.
        device: on which tensors are that were not on the CPU.
        registered: tensors that the model's state has; an attribute may show them.
    """

    def __init__(
        self,
        owner: Any,
        *,
        without: Collection[str] = (),
        flags: bool = True,
        tensors: bool = True,
        device: Callable[[], torch.device] | None = None,
        registered: Registered | None = None,
    ) -> None:
        self._owner = owner
        self._without = frozenset(without)
        self._flags, self._tensors = flags, tensors
        self._device = device
        self._registered = registered
        self._objects: dict[str, Callable[[], Any]] = {}
        self._before: dict[str, Any] = {}
        self._at_begin: dict[str, Any] = {}
        self._empty: set[str] = set()
        self._there: set[str] = set()
        self._restored: frozenset[str] = frozenset()
        self._late: frozenset[str] = frozenset()

    def remember(self) -> None:
        """Attributes that will not have changed from now on are as the script makes them."""
        if self._registered is not None:
            self._registered.look()
        self._before = {name: _noted(value) for name, value in self._found()}
        self._objects = {name: _reference(value) for name, value in self._found()}
        empty = {name for name, value in self._all() if value is None}
        self._there = {name for name, _ in self._all()} - empty
        self._empty = (self._before.keys() | empty) - self._without

    def begin(self) -> None:
        """The first step comes next. What the script has set since :meth:`remember`, and leaves
        alone from now on, may be of this process: a time, a folder, its rank."""
        self._at_begin = {name: _noted(value) for name, value in self._found()}

    def unsaved(self) -> list[str]:
        """Behind the first step: what the attributes that could have been saved when the training
        began hold now, if they cannot be any more, each in words; with flags that the step has set
        beside an object that it has made: the next attempt has to make that again."""
        now, kind = dict(self._all()), type(self._owner).__name__
        lost = sorted(name for name in self._empty if name in now and not is_plain(now[name]))
        words = [f"{kind}.{name} ({type(now[name]).__name__})" for name in lost]
        made, flags = self._made()
        return [*words, *(f"{kind}.{name} (True beside {made})" for name in sorted(flags))]

    def leave_unsaved(self) -> None:
        """Do not save those flags from now on."""
        self._without |= self._made()[1]

    def _made(self) -> tuple[str, set[str]]:
        """An object that has come since :meth:`remember`, and the flags that may say so."""
        now = dict(self._all())
        odd = {name for name, value in now.items() if not is_plain(value)}
        made = sorted(odd - self._there - self._without)
        if not made or not self._flags:
            return "", set()
        flags = {
            name
            for name, value in now.items()
            if value is True and self._before.get(name, False) is False
        }
        return made[0], flags - self._without

    def state_dict(self) -> dict[str, Any]:
        changed = {
            name: value
            for name, value in self._found()
            if name in self._restored or not _shows(self._before.get(name, _NONE), value)
        }
        return {
            "values": {name: plain(value) for name, value in changed.items()},
            "early": sorted(
                name
                for name, value in changed.items()
                if name not in self._late and _shows(self._at_begin.get(name, _NONE), value)
            ),
            "kept": sorted(
                name
                for name, value in changed.items()
                if name in self._objects and self._objects[name]() is value
            ),
            "buffers": sorted(changed.keys() & self._buffers()),
            "on_device": sorted(
                name
                for name, value in changed.items()
                if any(one.device.type != "cpu" for one in tensors_in(value))
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, is_resized: bool = False) -> None:
        """A time or a text that was set before the first step, and is set again by now, stays as it
        is: it is that of this attempt, by the clock of this machine, or a folder of this job.

        Args:
            is_resized: so does everything else that was, for another number of ranks has saved it.
        """
        self._restored = frozenset(state["values"])
        self._late = self._restored - set(state["early"])
        own = dict(self._all())
        kept = set(state["kept"])
        for name, value in state["values"].items():
            here = own.get(name, _NONE)
            is_set = here is not _NONE and not _shows(self._before.get(name, _NONE), here)
            is_own = is_resized or isinstance(value, (float, str))
            if name not in self._late and is_set and is_own:
                continue
            device = self._device() if self._device and name in state["on_device"] else None
            # who else has the same list sees what is in it; one that took its place is a new one
            here = here if name in kept else form_of(here)
            made = put(here, value, device=device)
            if name in state["buffers"] and name not in own:
                self._owner.register_buffer(name, made, persistent=False)
            else:
                setattr(self._owner, name, made)

    def _buffers(self) -> set[str]:
        """Those that are left out of the module's state: what says how far they are valid may be an
        attribute, and would come back without them."""
        if not isinstance(self._owner, torch.nn.Module):
            return set()
        return self._owner._buffers.keys() & self._owner._non_persistent_buffers_set

    def _all(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self._owner).items()
        for name in sorted(self._buffers()):
            yield name, self._owner._buffers[name]

    def _found(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._all():
            if name in self._without or (not self._flags and isinstance(value, SIMPLE)):
                continue
            before = self._before.get(name)
            if isinstance(before, _Large) and before.shows(value) and name not in self._restored:
                continue  # a vocabulary, which is not looked through for each save
            if is_plain(value) and all(map(self._takes, tensors_in(value))):
                yield name, value

    def _takes(self, tensor: torch.Tensor) -> bool:
        return self._tensors and not (self._registered and self._registered.has(tensor))


class _Buffers(Attributes):
    """Of a module only those that its state leaves out."""

    def _all(self) -> Iterator[tuple[str, Any]]:
        yield from ((name, self._owner._buffers[name]) for name in sorted(self._buffers()))


class Registered:
    """The tensors that the state of a model has."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._at: dict[int, weakref.ref[torch.Tensor]] | None = None

    def look(self) -> None:
        """Once for all modules of the model."""
        if self._at is None:
            found = itertools.chain(self._model.parameters(), *map(_saved, self._model.modules()))
            self._at = {
                _storage(one): weakref.ref(one) for one in found if is_dense(one) and one.numel()
            }

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, or shows the memory of a weight or a buffer: a list of weights to
        be penalised, what an LSTM computes with."""
        if isinstance(tensor, torch.nn.Parameter):
            return True
        if not self._at or not tensor.numel():
            return False
        one = self._at.get(_storage(tensor))
        found = one() if one is not None else None
        return found is not None and _storage(found) == _storage(tensor)


def _saved(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Its own buffers that are part of its state."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield buffer


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _reference(value: Any) -> Callable[[], Any]:
    """To ask whether something is still this object."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return weakref.ref(value)
    return lambda: value


class _Large:
    """What is too large to be copied, and may never change: which object it is, and how far."""

    def __init__(self, value: Any) -> None:
        self._value, self._mark = value, self._mark_of(value)

    def shows(self, value: Any) -> bool:
        return value is self._value and self._mark_of(value) == self._mark

    @staticmethod
    def _mark_of(value: Any) -> int:
        if isinstance(value, torch.Tensor):
            return int(value._version)
        if isinstance(value, np.ndarray):
            return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return len(value)


def _noted(value: Any) -> Any:
    """By what it will be seen whether this value has changed."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        counts = isinstance(value, np.ndarray) or not value.is_inference()
        return _Large(value) if counts and value.nbytes > _LARGE_BYTES else plain(value)
    is_large = isinstance(value, (Mapping, *MANY)) and len(value) > _LARGE
    return _Large(value) if is_large else plain(value)


def _shows(noted: Any, value: Any) -> bool:
    return noted.shows(value) if isinstance(noted, _Large) else equal(value, noted)


def of_modules(model: torch.nn.Module, *, without: Collection[str] = ()) -> dict[str, Attributes]:
    """Those of a model and of the modules in it that the script has written: a queue's pointer, a
    probability that is scheduled.

    Args:
        without: names that the framework's own base class has put there.
    """
    own = {*vars(torch.nn.Module()), *without}

    def device() -> torch.device:
        some = next(itertools.chain(model.parameters(), model.buffers()), None)
        return torch.device("cpu") if some is None else some.device

    registered = Registered(model)
    return {
        f"module {name}": (_Buffers if is_of_library(module) else Attributes)(
            module, without=own, device=device, registered=registered
        )
        for name, module in model.named_modules()
        if not is_of_library(module) or module._non_persistent_buffers_set
    }


def is_of_library(thing: Any) -> bool:
    """Whether its class is one of a framework's, which saves what it has by itself."""
    kind = type(thing)
    if kind.__name__.startswith(("Parametrized", "FSDP")) and isinstance(thing, torch.nn.Module):
        kind = kind.__bases__[-1]  # torch has put a class of its own before that of the script
    return kind.__module__.partition(".")[0] in _LIBRARIES
