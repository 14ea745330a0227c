"""Giving objects their state back so that it is what was saved, and saying where it is not."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from hydroslurm.checkpoint.tree import local_of
from hydroslurm.errors import StateMismatch

_PLAIN = (torch.Tensor, bool, int, float, complex, type(None))
"""What ``Optimizer.load_state_dict`` does not take apart; of a tensor it changes the dtype."""

_SHOWN = 3
"""Differences named per object; the rest is counted."""


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
