"""What changes in the first step of an own loop besides optimizers, and is not part of the run: the
scale of a GradScaler, an average of the weights, random generators of the script's own.

They are looked for where a loop has them: in the variables of the function with the loop and of its
module, and in the attributes of the objects there.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.tree import is_dtensor
from hydroslurm.training.remedies import Remedies

# types are asked for, not isinstance(): a proxy of a library's may raise at that
_NO_OWNERS = (type, types.ModuleType, torch.nn.Module)
_LIBRARIES = ("torch", "numpy", "accelerate", "hydroslurm", "builtins")
_MOST = 256
"""Entries of a container, and elements of a tensor, that are looked at."""


class LeftOut:
    """Compares what is there between :meth:`open` and :meth:`close`."""

    def __init__(self) -> None:
        self._tensors: dict[str, list[tuple[torch.Tensor, object]]] = {}
        self._generators: dict[str, tuple[Any, object]] = {}
        self._scalers: dict[int, Any] = {}
        self._is_noted = False

    def open(self) -> Callable[[], None]:
        """Note what is there, the first time. Returns what ends the watch over scalers."""
        if not self._is_noted:
            self._is_noted = True
            for name, thing in _in_reach():
                if issubclass(type(thing), rng.KINDS):
                    self._generators[name] = thing, _state(thing)
                elif tensors := _tensors_of(thing):
                    self._tensors[name] = [(one, _shown(one)) for one in tensors]
        return self._watch_scalers()

    def forget(self) -> None:
        """Let go of the objects that were seen."""
        for seen in (self._tensors, self._generators, self._scalers):
            seen.clear()

    def oversight(
        self,
        objects: Iterable[Any],
        states: Any,
        *,
        have: Callable[[torch.Tensor], bool],
        remedies: Remedies,
    ) -> str | None:
        """The first thing that a resumed run would lack, with what to do; None if there is none.

        Args:
            objects: what is registered.
            states: what would be saved of them.
            have: whether a tensor is part of that.
        """
        known = {id(thing) for thing in objects}
        for scaler in self._scalers.values():
            if id(scaler) not in known and not _has_scale(states):
                return (
                    f"a GradScaler (scale {scaler.get_scale():g}) has scaled this step and is not "
                    "part of this run: resumed, it would begin with its first scale again. "
                    f"{remedies.scaler}"
                )
        for name, tensors in self._tensors.items():
            changed = [one for one, shown in tensors if _shown(one) != shown]
            if missing := [one for one in changed if not have(one)]:
                return (
                    f"{name} has changed in this step, and is not part of this run ({len(missing)} "
                    f"tensors, the first of shape {list(missing[0].shape)}): resumed, it would "
                    "begin anew. Is it an average of the weights? "
                    f"{remedies.of('average', name)}"
                )
        for name, (generator, was) in self._generators.items():
            if id(generator) not in known and _state(generator) != was:
                return (
                    f"random numbers were drawn from {name} ({type(generator).__name__}), which is "
                    "not part of this run: resumed, it would begin with its first numbers again. "
                    f"{remedies.of('generator', name)}"
                )
        return None

    def _watch_scalers(self) -> Callable[[], None]:
        own = GradScaler.update
        seen = self._scalers

        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            if scaler.is_enabled():
                seen[id(scaler)] = scaler
            own(scaler, *args, **kwargs)

        def put_back() -> None:
            if GradScaler.update is update:
                GradScaler.update = own  # type: ignore[method-assign]

        GradScaler.update = update  # type: ignore[assignment,method-assign]
        return put_back


def _in_reach() -> Iterator[tuple[str, Any]]:
    """What the loop can name, with its name there."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    if frame is None:
        return
    seen: set[int] = set()
    for name, thing in [*_variables(frame), *frame.f_globals.items()]:
        if id(thing) in seen or name.startswith("__"):
            continue
        seen.add(id(thing))
        yield name, thing
        for inner, part in _parts(thing):
            if id(part) not in seen:
                seen.add(id(part))
                yield f"{name}{inner}", part


def _variables(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Of a function. Before 3.13 its frame keeps a copy of them until it returns, and with it the
    batch of now: the copy is emptied."""
    local = frame.f_locals
    found = list(local.items())
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        local.clear()
    return found


def _parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of the script's, the entries of a container."""
    kind = type(thing)
    if kind in (list, tuple):
        yield from ((f"[{n}]", part) for n, part in enumerate(thing[:_MOST]))
    elif kind is dict:
        yield from ((f"[{key!r}]", part) for key, part in list(thing.items())[:_MOST])
    elif not issubclass(kind, _NO_OWNERS) and not _is_library(kind):
        with contextlib.suppress(Exception):  # a proxy of somebody's
            yield from ((f".{name}", part) for name, part in list(vars(thing).items())[:_MOST])


def _is_between(module: str) -> bool:
    """Whether a frame of it stands between the run and the script: ours, and bars of progress."""
    return module.partition(".")[0] in ("hydroslurm", "contextlib", "tqdm", "rich")


def _is_library(kind: type) -> bool:
    """Loaders and optimizers have generators and tensors that others look after."""
    return kind.__module__.partition(".")[0] in _LIBRARIES


def _tensors_of(thing: Any) -> list[torch.Tensor]:
    """Of a module, or of an object that keeps copies of weights in a list, as averages do. A tensor
    by itself is none: it may be a sum of losses."""
    if issubclass(type(thing), torch.nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    if _is_library(type(thing)):
        return []
    with contextlib.suppress(Exception):
        for kept in vars(thing).values():
            entries = list(kept.values()) if type(kept) is dict else kept
            many = type(entries) in (list, tuple) and len(entries) > 1
            if many and all(isinstance(one, torch.Tensor) and one.dim() for one in entries):
                return list(entries)
    return []


def _shown(tensor: torch.Tensor) -> bytes:
    """What tells whether a tensor was written to; of a large one, its first elements."""
    local = tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    if local.is_meta or local.layout is not torch.strided or local.is_quantized:
        return b""
    with contextlib.suppress(
        RuntimeError, ValueError
    ):  # not initialised yet, or its memory is away
        first = local.detach().reshape(-1)[:_MOST].cpu().contiguous()
        return first.view(torch.uint8).numpy().tobytes()
    return b""


def _state(generator: Any) -> object:
    """Of a generator, to be compared."""

    def plain(node: Any) -> object:
        if isinstance(node, torch.Tensor):
            return node.numpy().tobytes()
        if isinstance(node, dict):
            return {key: plain(value) for key, value in node.items()}
        return [plain(one) for one in node] if isinstance(node, (list, tuple)) else node

    return plain(rng.state_of(generator))


def _has_scale(tree: Any) -> bool:
    if isinstance(tree, dict):
        return {"scale", "_growth_tracker"} <= tree.keys() or any(map(_has_scale, tree.values()))
    return isinstance(tree, (list, tuple)) and any(map(_has_scale, tree))
