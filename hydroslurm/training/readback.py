"""Giving objects their state back so that it is what was saved, and saying where it is not. Loaded
by a run that resumes.

A change that would make the resume wrong is an error, raised before anything is loaded. One that a
user may make, and that only costs bitwise equality, is one line in the log.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.lr_scheduler import LRScheduler

from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.tree import local_of
from hydroslurm.errors import CheckpointError, StateMismatch
from hydroslurm.training.objects import Composition, Loading, Stateful, class_name

_LOADED_LAST = ("model", "optimizer", "scheduler", "scaler")
"""The arguments of a Run. What is registered besides may rebuild what these are loaded into."""
_PLAIN = (torch.Tensor, bool, int, float, complex, type(None))
"""What ``Optimizer.load_state_dict`` does not take apart; of a tensor it changes the dtype."""

_SHOWN, _KEYS_SHOWN = 3, 5
"""Differences named per object, and keys per kind of difference; the rest is counted."""
_NO_OPTIONS = frozenset({"params", "param_names"})


def read_back(
    objects: Mapping[str, Stateful], states: Mapping[str, Any], *, source: str
) -> list[str]:
    """Give every object its state back: in this order, but the model, the optimizer, the scheduler
    and the scaler of a Run after all others.

    Args:
        objects: without wrappers.
        source: of the states, for messages.

    Returns:
        A sentence about each object that is not what was saved.

    Raises:
        StateMismatch: one is missing in the checkpoint, or does not fit; names the keys.
    """
    missing = [name for name in objects if name not in states]
    if missing:
        raise StateMismatch(
            f"{source} has no state for {', '.join(missing)}; it has "
            f"{', '.join(states) or 'nothing'}. Was it written by another script, or before "
            "these objects were registered? Use another directory= to start anew"
        )
    for name in sorted(objects, key=lambda name: name in _LOADED_LAST):
        _load(name, objects[name], states[name], source)
    sentences = (lost(name, thing, states[name]) for name, thing in objects.items())
    return [sentence for sentence in sentences if sentence is not None]


def _load(name: str, thing: Stateful, state: Any, source: str) -> None:
    try:
        if isinstance(thing, torch.nn.Module) and isinstance(state, dict):
            # torch's own complaint comes after it has copied what did fit
            check_layout(name, state, thing.state_dict())
            load_module(name, thing, state)
        elif isinstance(thing, torch.optim.Optimizer) and isinstance(state, dict):
            load_optimizer(thing, state)
        else:
            thing.load_state_dict(state)
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        message = f"{source} does not fit {name!r} ({type(thing).__name__}): {error}"
        raise StateMismatch(message + _advice(thing, error)) from error


def _advice(thing: Any, error: Exception) -> str:
    if not isinstance(thing, torch.optim.Optimizer) or "parameter group" not in str(error):
        return ""
    return (
        ". Parameter groups that are added while training have to be there before: add them again "
        "in the load_state_dict() of an object in extra=, which is loaded first"
    )


# --- optimizers
# ------------------------------------------------------------------------------------------------


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """As its ``load_state_dict``; what torch changes on the way is put back as it was saved.

    torch casts each tensor but ``step`` to the dtype of its parameter, and makes anything else that
    can be iterated anew from a generator: float32 momentum of bfloat16 weights, indices and strings
    are silently lost, and for an array or a range the call fails.

    Raises:
        RuntimeError, ValueError, KeyError, TypeError: the state belongs to another optimizer.
    """
    kind = type(optimizer)
    saved = state.get("state")
    if not _is_saved_as_it_is(optimizer) or not isinstance(saved, dict):
        optimizer.load_state_dict(state)
        return
    values = {key: _held(one) if isinstance(one, dict) else one for key, one in saved.items()}
    held = {**state, "state": values}
    if kind.load_state_dict is torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(held)
    else:
        try:  # it may want to look at the values
            optimizer.load_state_dict(state)
        except TypeError:  # as torch's does of an array
            optimizer.load_state_dict(held)
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if len(numbers) != len(params):  # of no meaning to us, if its own load_state_dict has taken it
        return
    for number, param in zip(numbers, params, strict=True):
        if isinstance(saved.get(number), dict):
            _put_back(optimizer.state[param], saved[number], device=param.device)


def _is_saved_as_it_is(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its state_dict is what it has in memory: nobody has hooked or written another one."""
    hooks = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return type(optimizer).state_dict is torch.optim.Optimizer.state_dict and not any(
        getattr(optimizer, f"_optimizer_{name}_hooks", None) for name in hooks
    )


class _Held:
    """Hides a value from torch, which looks into all that can be iterated."""


def _held(values: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value if isinstance(value, _PLAIN) else _Held() for key, value in values.items()}


def _put_back(now: dict[Any, Any], saved: dict[Any, Any], *, device: torch.device) -> None:
    """What one parameter has by now, made what was saved. Plain numbers are left alone: Adam of
    today makes tensors of the step counts of old."""
    for key, value in saved.items():
        if key not in now:
            continue
        here = now[key]
        if isinstance(value, torch.Tensor):
            # torch itself keeps the dtype of "step", except for a fused or captured one
            if isinstance(here, torch.Tensor) and here.dtype != value.dtype and key != "step":
                now[key] = value.to(device=here.device)
        elif isinstance(value, _PLAIN):
            continue
        elif isinstance(here, _Held) or isinstance(value, type(here)):
            now[key] = _moved(value, device)


def _moved(value: Any, device: torch.device) -> Any:
    """The tensors in it on a device; containers stay what they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device)
    if isinstance(value, dict):
        for key, one in value.items():
            value[key] = _moved(one, device)
    elif isinstance(value, (list, deque)):
        for place, one in enumerate(value):
            value[place] = _moved(one, device)
    elif type(value) is tuple:
        return tuple(_moved(one, device) for one in value)
    return value


# --- modules
# ------------------------------------------------------------------------------------------------


def load_module(name: str, module: torch.nn.Module, state: Mapping[str, Any]) -> None:
    """As its ``load_state_dict``, into expanded buffers too, which torch refuses to write to: they
    show the same memory in many places.

    Raises:
        StateMismatch: what such a buffer shows once has several values in the checkpoint.
        RuntimeError: the state belongs to another module.
    """
    expanded = {
        key: (tensor, places)
        for key, tensor in module.state_dict().items()
        if key in state and (places := _repeated(tensor)) is not None
    }
    if not expanded:
        module.load_state_dict(state)
        return
    left = copy.copy(state)
    assert isinstance(left, dict)
    for key in expanded:
        del left[key]
    module.load_state_dict(left, strict=False)  # the names were compared before
    for key, (tensor, places) in expanded.items():
        once = state[key][places]
        if not _same_bits(once.expand_as(state[key]), state[key]):
            raise StateMismatch(
                f"{name}.{key} is one value in many places here (expand()), and the checkpoint has "
                "different values there. Register it as it was when it was saved"
            )
        with torch.no_grad():
            tensor[places].copy_(once)


def _repeated(tensor: Any) -> tuple[slice, ...] | None:
    """Where an expanded tensor has its own memory, once; None for any other."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return None
    axes = list(zip(tensor.shape, tensor.stride(), strict=True))
    if not any(size > 1 and stride == 0 for size, stride in axes):
        return None
    return tuple(slice(0, 1) if stride == 0 else slice(None) for _, stride in axes)


# --- what is there now, and what was saved
# ------------------------------------------------------------------------------------------------


def lost(name: str, thing: Any, state: Any) -> str | None:
    """What an object that was just loaded does not have as it was saved, in one sentence.

    Of modules and optimizers, which torch copies, dtypes and shapes are compared and not the
    values of the tensors. What the object has besides is its own.
    """
    try:
        now = thing.state_dict()
    except Exception:  # some can be asked at certain moments only; the next save tells
        return None
    values = not isinstance(thing, (torch.nn.Module, torch.optim.Optimizer))
    found = list(_differences(state, now, name, values=values))
    if not found:
        return None
    rest = f" (and {len(found) - _SHOWN} more)" if len(found) > _SHOWN else ""
    return (
        f"{name!r} ({type(thing).__name__}) was loaded and is not what it was: "
        f"{'; '.join(found[:_SHOWN])}{rest}. The run may differ from one that was not stopped: "
        "load_state_dict() has to take back all that state_dict() gives"
    )


def _differences(saved: Any, now: Any, path: str, *, values: bool) -> Iterator[str]:
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        if is_lazy(now) or (_kind(saved), saved.shape) != (_kind(now), now.shape):
            yield f"{path} was {_kind(saved)}, is {_kind(now)}"
        elif values and not _same_bits(saved, now):
            yield f"{path} has other values"
    elif type(saved) is not type(now):
        yield f"{path} was {_shown(saved)}, is {_shown(now)}"
    elif isinstance(saved, dict):
        for key, one in saved.items():
            below = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
            if key in now:
                yield from _differences(one, now[key], below, values=values)
            else:
                yield f"{below} is gone"
    elif isinstance(saved, (list, tuple, deque)):
        if len(saved) != len(now):
            yield f"{path} had {len(saved)} items, has {len(now)}"
        elif getattr(saved, "maxlen", None) != getattr(now, "maxlen", None):
            yield f"{path} had maxlen={saved.maxlen}, has maxlen={now.maxlen}"  # type: ignore[union-attr]
        else:
            for place, (one, other) in enumerate(zip(saved, now, strict=True)):
                yield from _differences(one, other, f"{path}[{place}]", values=values)
    elif not _equal(saved, now):
        yield f"{path} was {_shown(saved)}, is {_shown(now)}"


def _equal(saved: Any, now: Any) -> bool:
    if isinstance(saved, np.ndarray):
        return (saved.dtype, saved.shape, saved.tobytes()) == (now.dtype, now.shape, now.tobytes())
    return bool(saved == now) or bool(saved != saved and now != now)  # NaN


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """NaN and all, of two tensors of one dtype and shape, wherever they are."""
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat: torch.Tensor = (
        local_of(tensor).detach().cpu().resolve_conj().resolve_neg().contiguous().flatten()
    )
    return flat.view(torch.uint8)


def _kind(tensor: torch.Tensor) -> str:
    if is_lazy(tensor):
        return "not initialised"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, (bool, int, float, str, type(None))):
        return f"{value!r:.40}" if len(repr(value)) <= 40 else f"{value!r:.40}..."
    return f"a {kind}"


# --- what a run was made of
# ------------------------------------------------------------------------------------------------


def changed_objects(
    objects: Mapping[str, Stateful], states: Mapping[str, Any], *, classes: Mapping[str, str]
) -> Iterator[str]:
    """Say which objects are others than those that were saved, each in a sentence.

    Args:
        classes: of those that were saved.

    Raises:
        StateMismatch: one of them cannot go on with what was saved.
    """
    for name, thing in objects.items():
        if name in states:
            message = changed_class(name, thing, states[name], was=classes.get(name))
            if message is not None:
                yield message
    if forgotten := [name for name in states if name not in objects]:
        yield (
            f"the checkpoint has a state for {', '.join(forgotten)}, which this run does not "
            "have: it is left out, of what is saved from now on too"
        )


def changed_class(name: str, thing: Any, state: Any, *, was: str | None) -> str | None:
    """Say that an object is of another class than the one that was saved. That it was renamed or
    moved is nobody's business; for a module its keys, shapes and dtypes count.

    Raises:
        StateMismatch: an optimizer or a scheduler of another kind; both would take a part of what
            was saved for theirs, and fail later or train in another way.
    """
    now = class_name(thing)
    if was is None or was.rpartition(".")[2] == now.rpartition(".")[2]:
        return None
    ours, theirs = _options(thing, state)
    if ours != theirs:
        raise StateMismatch(
            f"{name!r} was a {was}, and is a {now}: the checkpoint has {_listed(theirs - ours)}, "
            f"it wants {_listed(ours - theirs)}. Make it as it was. To change it on purpose, begin "
            "anew with the weights of `hydroslurm checkpoint export --only model`, in another "
            "directory= or by Run(resume=False)"
        )
    return f"{name!r} was a {was}, and is a {now}; what was saved fits it, and is loaded"


def changes(manifest: Manifest, now: Loading, *, world_size: int, data: Any) -> Iterator[str]:
    """Report how the batches differ from those of the attempt that saved.

    Args:
        data: the saved position; None between two epochs.

    Raises:
        StateMismatch: the position is inside an epoch, and nobody could say which of its samples
            were seen.
    """
    was, ranks = Composition.of(manifest).loader, manifest.world_size
    if ranks != world_size:
        yield (
            f"step {manifest.step} was saved by {_ranks(ranks)}, and goes on with "
            f"{_ranks(world_size)}: the bits differ from those of a run that kept its ranks"
        )
    differing = [
        f"{message} was {before!r}, and is {after!r}"
        for message, before, after in (
            ("the loader's batch_size", was.batch_size, now.batch_size)
            if ranks == world_size
            else ("the batch of all ranks", was.batch_of(ranks), now.batch_of(world_size)),
            ("the length of its data set", was.samples, now.samples),
            ("the class of its sampler", was.sampler, now.sampler),
        )
        if None not in (before, after) and before != after
    ]
    if not differing:
        return
    said = "; ".join(differing)
    if ranks == world_size and _is_counted_in_batches(data):
        raise StateMismatch(
            f"{said}: the run was stopped inside epoch {data['epoch']}, behind batch "
            f"{data['batches']}, and which samples those were cannot be told with another loader. "
            "Make it as it was; to change it on purpose do so between two epochs, or give it "
            "sampler=hydroslurm.data.ResumableSampler(dataset) from the beginning, which counts "
            "samples and takes another batch_size"
        )
    yield f"{said}: from here on the steps are not those of a run that was left as it was"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _is_counted_in_batches(data: Any) -> bool:
    return (
        isinstance(data, Mapping)
        and bool(data.get("begun"))
        and not data.get("finished")
        and data.get("strategy") != "sampler"
    )


def _options(thing: Any, state: Any) -> tuple[set[str], set[str]]:
    """The names by which kinds of optimizers and schedulers are told apart: here, and as saved."""
    if isinstance(thing, torch.optim.Optimizer):
        with contextlib.suppress(TypeError, KeyError, IndexError, AttributeError):
            groups = thing.param_groups[0], state["param_groups"][0]
            return set(groups[0]) - _NO_OPTIONS, set(groups[1]) - _NO_OPTIONS
    elif isinstance(thing, LRScheduler) and isinstance(state, Mapping):
        return set(thing.state_dict()), set(state)
    return set(), set()


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing else"


def check_layout(name: str, saved: Mapping[Any, Any], target: Mapping[Any, Any]) -> None:
    """Compare a saved state_dict with the one of the object that it is to be loaded into.

    Raises:
        StateMismatch: keys, shapes or dtypes differ.
    """
    message = compare(saved, target)
    if message:
        raise StateMismatch(
            f"the checkpoint's {name!r} belongs to another {name}: {message}. Load it into the "
            "class that it was saved from, or take what fits with "
            f"`hydroslurm checkpoint export --only {name}`"
        )


def compare(saved: Mapping[Any, Any], target: Mapping[Any, Any]) -> str | None:
    """What differs between two state_dicts in one sentence, None when nothing does."""
    both = [(key, saved[key], target[key]) for key in saved if key in target]
    parts = [
        _named("only the checkpoint has", [repr(key) for key in saved if key not in target]),
        _named("the checkpoint lacks", [repr(key) for key in target if key not in saved]),
        _named("other shapes:", _different(both, _shape)),
        _named("other dtypes:", _different(both, _dtype)),  # which torch would cast silently
    ]
    return "; ".join(part for part in parts if part) or None


def _different(both: list[tuple[Any, Any, Any]], attribute: Callable[[Any], object]) -> list[str]:
    """The keys whose values, saved and now, have different attributes."""
    found = [(key, attribute(saved), attribute(target)) for key, saved, target in both]
    return [
        f"{key!r} is {saved} in the checkpoint and {target} here"
        for key, saved, target in found
        if saved is not None and target is not None and saved != target
    ]


def _shape(value: Any) -> list[int] | None:
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # of a lazy layer that has seen no batch: it takes any
        return None
    return None if shape is None else list(shape)


def _dtype(value: Any) -> str | None:
    dtype = getattr(value, "dtype", None)
    return None if dtype is None else str(dtype)


def _named(what: str, names: Collection[str]) -> str:
    if not names:
        return ""
    shown = ", ".join(list(names)[:_KEYS_SHOWN])
    rest = len(names) - _KEYS_SHOWN
    return f"{what} {shown}" + (f" and {rest} more" if rest > 0 else "")
