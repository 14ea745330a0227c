"""What a script's modules and its other objects have that is in no ``state_dict()``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint.plain import size_bytes
from hydroslurm.training.attributes import Attributes, of_modules
from hydroslurm.training.module_settings import ModuleSettings

_MUCH_BYTES = 2**28


class ScriptState:
    """How the modules of models are set, and the attributes of objects, as far as they have changed
    since :meth:`remember`.

    Args:
        models: see :class:`ModuleSettings`.
        objects: by name; see :class:`Attributes`.
        world_size: of the ranks, each of which has a state of its own.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[Any, Any]] = dict,
        objects: Mapping[str, Attributes] | None = None,
        *,
        world_size: int = 1,
    ) -> None:
        self._settings = ModuleSettings(models)
        self._objects = objects or {}
        self._world_size = world_size

    def remember(self) -> None:
        """What will not have changed from now on is as the script makes it."""
        self._settings.remember()
        for one in self._objects.values():
            one.remember()

    def begin(self) -> None:
        """As :meth:`Attributes.begin`, and :meth:`ModuleSettings.begin`."""
        self._settings.begin()
        for one in self._objects.values():
            one.begin()

    def follow_frozen(self) -> None:
        """As :meth:`ModuleSettings.begin`."""
        self._settings.begin()

    def frozen(self) -> set[int]:
        """As :meth:`ModuleSettings.frozen`."""
        return self._settings.frozen()

    def unsaved(self) -> list[str]:
        """As :meth:`Attributes.unsaved`."""
        return [text for one in self._objects.values() for text in one.unsaved()]

    def leave_unsaved(self) -> None:
        """As :meth:`Attributes.leave_unsaved`."""
        for one in self._objects.values():
            one.leave_unsaved()

    def state_dict(self) -> dict[str, Any]:
        """Empty, if nothing has changed."""
        settings = self._settings.state_dict()
        states = {name: one.state_dict() for name, one in self._objects.items()}
        found = {name: state for name, state in states.items() if state["values"]}
        if not (settings or found):
            return {}
        return {"settings": settings, "objects": found, "world_size": self._world_size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        self._settings.load_state_dict(state["settings"])
        is_resized = state["world_size"] != self._world_size
        for name, one in self._objects.items():
            if name in state["objects"]:
                one.load_state_dict(state["objects"][name], is_resized=is_resized)


def of_objects(things: Mapping[str, Any], *, world_size: int) -> ScriptState:
    """That of the modules among them, as they are now."""
    modules = {name: one for name, one in things.items() if isinstance(one, torch.nn.Module)}
    attributes = {
        f"{name} {place}": found
        for name, module in modules.items()
        for place, found in of_modules(module).items()
    }
    state = ScriptState(lambda: modules, attributes, world_size=world_size)
    state.remember()
    return state


def largest(state: Mapping[str, Any]) -> str | None:
    """The attributes that are most of a :class:`ScriptState`'s, in words, if it is a large one:
    each rank writes its own into each checkpoint."""
    sizes = {
        f"{place}.{name}": size
        for place, values in state.get("objects", {}).items()
        for name, value in values["values"].items()
        if (size := size_bytes(value))
    }
    if (total := sum(sizes.values())) < _MUCH_BYTES:
        return None
    most = sorted(sizes, key=lambda name: -sizes[name])[:3]
    names = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in most)
    return f"{names}, of {total / 2**20:.0f} MiB in attributes"
