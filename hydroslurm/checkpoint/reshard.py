"""How tensors of a checkpoint are laid out over the ranks that load it. Pure.

Templates say it: trees like the saved ones, or coarser ones, by the name of what was saved.

    a DTensor where the checkpoint has a tensor of its shape   that tensor is laid out like it
    a DTensor where the checkpoint has a container             every tensor of its shape in there
    anything else, or nothing                                  the tensor comes back whole

The second line is for optimizers: in a process that has just begun they have no state yet, but for
every parameter there will be tensors of its shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.skeleton import JsonValue, is_dtensor, join

Place = tuple[JsonValue, Any]


def like_of(thing: Any) -> Any:
    """The template for the state of an object: of an optimizer its parameters, by their number in
    its state_dict; of a module its state_dict; of anything else none."""
    if isinstance(thing, torch.optim.Optimizer):
        parameters = [one for group in thing.param_groups for one in group["params"]]
        return {"state": dict(enumerate(parameters))}
    return thing.state_dict() if isinstance(thing, torch.nn.Module) else None


def templates(skeleton: JsonValue, like: Any) -> dict[str, torch.Tensor]:
    """The key of a tensor in the checkpoint -> the DTensor whose layout it gets, if any.

    Args:
        skeleton: what ``skeleton.split`` has made of the state.
        like: the template of that state.
    """
    found: dict[str, torch.Tensor] = {}
    open_places: list[Place] = [(skeleton, like)]
    while open_places:
        value, template = open_places.pop()
        if isinstance(value, dict) and "$tensor" in value:
            if is_dtensor(template):
                found[value["$tensor"]] = template
        elif template is not None:
            open_places.extend(_below(value, template))
    return found


def _below(value: JsonValue, template: Any) -> Iterator[Place]:
    """What a container of a skeleton holds, each with its template."""
    if isinstance(value, list):
        for place, one in enumerate(value):
            yield one, _at(template, place)
        return
    if not isinstance(value, dict):
        return
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        for key, one in value.items():
            yield one, _at(template, key)
        return
    body = value[tag]
    if tag == "$tuple":
        yield body, template
    elif tag in ("$dict", "$counter"):
        yield from _pairs(body, template)
    elif tag == "$ordered":
        yield from _pairs(body[0], template)
    elif tag == "$defaultdict":
        yield from _pairs(body[1], template)
    elif tag == "$deque":
        yield body[0], template


def _pairs(pairs: Any, template: Any) -> Iterator[Place]:
    for key, one in pairs:
        yield one, _at(template, join(key, {}))


def _at(template: Any, key: Any) -> Any:
    """The template of one thing in a container."""
    if is_dtensor(template):
        return template
    if isinstance(template, Mapping):
        return template.get(key)
    if isinstance(template, (list, tuple)) and isinstance(key, int) and key < len(template):
        return template[key]
    return None
