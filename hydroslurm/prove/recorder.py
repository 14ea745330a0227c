"""Records each optimizer step, within the script under test.

It hooks what every PyTorch training uses, whatever framework drives it: the outermost forward of a
module in training mode (samples, random numbers), ``torch.autograd.backward`` (the loss),
``Optimizer.step`` (weights, the optimizer's state, learning rates) and the DataLoader's iterator
(a batch's samples). It draws no random number and changes no tensor.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import dataloader

from hydroslurm.prove.updates import LIMIT_FILE, PROVE_ENV, Update, file_of

_MOST_KNOWN_ROWS = 1 << 20


class Recorder:
    """Collects the parts of a step, and writes it when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._limit = path.with_name(LIMIT_FILE)
        self._made = 0
        self._fd: int | None = None
        self._pid = os.getpid()
        self._depth = 0
        self._optimizers: dict[int, int] = {}
        self._modules: dict[int, torch.nn.Module] = {}
        self._index_of: dict[str, int] = {}
        self._iterator_of: dict[str, int] = {}
        self._iterators = itertools.count(1)
        self._before: dict[str, Any] | None = None
        self._clear()

    def _clear(self) -> None:
        self._forwards: list[tuple[dict[str, str], tuple[str, ...]]] = []
        self._losses: list[str] = []
        self._used = 0  # forwards that were followed by a backward

    def hook(self) -> None:
        """Install all hooks, for good."""
        register_optimizer_step_pre_hook(self._begin_step)
        register_optimizer_step_post_hook(self._end_step)
        call = torch.nn.Module.__call__
        recorder = self

        def outermost(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            recorder._depth += 1
            try:
                if recorder._depth == 1:
                    recorder._see_forward(module, args, kwargs)
                return call(module, *args, **kwargs)
            finally:
                recorder._depth -= 1

        torch.nn.Module.__call__ = outermost  # type: ignore[method-assign]
        backward = torch.autograd.backward

        def seen_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            recorder._see_loss(tensors)
            backward(tensors, *args, **kwargs)

        torch.autograd.backward = seen_backward
        for owner in (Optimizer, torch.nn.Module):
            self._hook_zero_grad(owner)
        self._hook_loader()

    def _hook_zero_grad(self, owner: Any) -> None:
        zero_grad = owner.zero_grad
        recorder = self

        def seen_zero_grad(thing: Any, *args: Any, **kwargs: Any) -> None:
            recorder._forget_gradients()
            zero_grad(thing, *args, **kwargs)

        owner.zero_grad = functools.wraps(zero_grad)(seen_zero_grad)

    def _hook_loader(self) -> None:
        """Hook iterators; batches come in the order in which the sampler was asked."""
        base: Any = dataloader._BaseDataLoaderIter
        next_index, next_batch = base._next_index, base.__next__
        recorder = self

        def asked(iterator: Any) -> Any:
            index = next_index(iterator)
            iterator.__dict__.setdefault("_hydroslurm_asked", deque()).append(index)
            return index

        def given(iterator: Any) -> Any:
            batch = next_batch(iterator)
            own = iterator.__dict__
            if waiting := own.get("_hydroslurm_asked"):
                if "_hydroslurm_number" not in own:
                    own["_hydroslurm_number"] = next(recorder._iterators)
                recorder._see_batch(batch, waiting.popleft(), own["_hydroslurm_number"])
            return batch

        base._next_index, base.__next__ = asked, given

    def _see_batch(self, batch: Any, indices: Any, iterator: int) -> None:
        rows = next((_rows(tensor) for tensor in _tensors(batch)), ())
        if not isinstance(indices, (list, tuple)) or len(indices) != len(rows):
            return
        if len(self._index_of) > _MOST_KNOWN_ROWS:
            self._index_of.clear()
            self._iterator_of.clear()
        for row, index in zip(rows, indices, strict=True):
            if isinstance(index, int):
                self._index_of[row] = index
            self._iterator_of[row] = iterator

    def _see_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self._pid != os.getpid():
            return
        # a wrapper may stay in evaluation mode: Lightning's validation restores the modes inside
        # DistributedDataParallel, but not its own
        if not any(m.training for m in module.modules()):
            return
        rows = next((_rows(tensor) for tensor in _tensors((args, kwargs))), ())
        if id(module) not in self._modules:
            self._modules[id(module)] = module
            if self._before is not None:  # in a closure, which the optimizer calls in its step
                self._before["buffers"].update(_buffers(module))
        self._forwards.append((_generators(), rows))

    def _see_loss(self, tensors: Any) -> None:
        for tensor in _tensors(tensors):
            value = repr(tensor.item()) if tensor.numel() == 1 else _crc(tensor)
            self._losses.append(value)
        self._used = len(self._forwards)

    def _forget_gradients(self) -> None:
        """Drop forwards that do not belong to the next step: a warm-up, or a skipped step."""
        del self._forwards[: self._used], self._losses[:]
        self._used = 0

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = {
            "optimizer": self._optimizers.setdefault(id(optimizer), len(self._optimizers)),
            "weights": dict(_weights(optimizer)),
            "state": dict(_state(optimizer)),
            "buffers": {
                name: crc
                for module in self._modules.values()
                for name, crc in _buffers(module).items()
            },
            "lr": tuple(str(float(group.get("lr", "nan"))) for group in optimizer.param_groups),
        }

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        before, self._before = self._before, None
        if before is None or self._pid != os.getpid():
            return
        names = self._names(optimizer)
        for kind in ("weights", "state"):
            before[kind] = {_named(key, names): crc for key, crc in before[kind].items()}
        first = next((row for rows in self._forwards for row in rows[1]), "")
        self._write(
            Update(
                **before,
                after={_named(key, names): crc for key, crc in _weights(optimizer)},
                rng=self._forwards[0][0] if self._forwards else _generators(),
                rows=tuple(rows for _, rows in self._forwards),
                samples=tuple(tuple(map(self._index_of.get, rows)) for _, rows in self._forwards),
                losses=tuple(self._losses),
                iterator=self._iterator_of.get(first),
            )
        )
        self._clear()
        self._made += 1
        self._wait_for_leave()

    def _wait_for_leave(self) -> None:
        """Wait until the next step is allowed, so that the stopper chooses where it stops."""
        while (text := self._limit.read_text().strip()) and self._made >= int(text):
            time.sleep(0.002)

    def _names(self, optimizer: Optimizer) -> dict[Place, str]:
        """Return an optimizer's parameter names in the modules seen."""
        known = {
            id(parameter): name
            for module in self._modules.values()
            for name, parameter in module.named_parameters()
        }
        return {
            place: known[id(parameter)]
            for place, parameter in _parameters(optimizer)
            if id(parameter) in known
        }

    def _write(self, update: Update) -> None:
        if self._fd is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._path, flags, 0o600)
        line = msgspec.json.encode(update) + b"\n"
        while line:  # a full disk raises: a proof with gaps proves nothing
            line = line[os.write(self._fd, line) :]


def start() -> None:
    """Record this process; called at the end of its ``import torch``."""
    if os.environ.get(PROVE_ENV):
        Recorder(file_of(os.environ)).hook()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _rows(tensor: torch.Tensor) -> tuple[str, ...]:
    """Return one CRC per sample."""
    return tuple(map(_crc, tensor.detach())) if tensor.dim() else (_crc(tensor),)


def _crc(tensor: torch.Tensor) -> str:
    local: Callable[[], torch.Tensor] | None = getattr(tensor, "to_local", None)  # a DTensor's part
    value = (local() if local is not None else tensor).detach()
    if value.layout != torch.strided:
        value = value.to_dense()
    flat = value.cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(flat.numpy().data):08x}"


Place: TypeAlias = tuple[int, int]
"""Of a parameter: its group in the optimizer, and its index in that."""


def _parameters(optimizer: Optimizer) -> Iterator[tuple[Place, torch.Tensor]]:
    for g, group in enumerate(optimizer.param_groups):
        for p, parameter in enumerate(group["params"]):
            yield (g, p), parameter


def _weights(optimizer: Optimizer) -> Iterator[tuple[tuple[Place, str], str]]:
    return (((place, ""), _crc(parameter)) for place, parameter in _parameters(optimizer))


def _state(optimizer: Optimizer) -> Iterator[tuple[tuple[Place, str], str]]:
    for place, parameter in _parameters(optimizer):
        for key, value in optimizer.state.get(parameter, {}).items():
            text = _crc(value) if isinstance(value, torch.Tensor) else repr(value)[:100]
            yield (place, f".{key}"), text


def _named(key: tuple[Place, str], names: Mapping[Place, str]) -> str:
    (g, p), rest = key
    return names.get((g, p), f"group{g}.param{p}") + rest


def _buffers(module: torch.nn.Module) -> dict[str, str]:
    return {name: _crc(buffer) for name, buffer in module.named_buffers()}


def _generators() -> dict[str, str]:
    """Return what each generator's next random number depends on. Draws none."""
    states = {
        "torch": _crc(torch.get_rng_state()),
        "random": f"{zlib.crc32(repr(random.getstate()).encode()):08x}",
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy"] = f"{zlib.crc32(repr(rest).encode(), zlib.crc32(keys)):08x}"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = _crc(torch.cuda.get_rng_state())
    return states
