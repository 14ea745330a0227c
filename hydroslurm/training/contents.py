"""What a run saves beside the states of its objects: what no ``state_dict()`` has, as far as the
script has changed it since the run began."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import CodeType, MappingProxyType
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from hydroslurm.checkpoint.census import Census, Unkept, shown
from hydroslurm.checkpoint.known import KNOWN
from hydroslurm.checkpoint.plain import size_bytes
from hydroslurm.checkpoint.tree import local_of
from hydroslurm.training.objects import bare
from hydroslurm.training.variables import in_reach, place

_MUCH_BYTES = 2**28
_NOT_GIVEN = (
    "has stepped and is not part of this run: resumed, it would begin anew. Make it before the run "
    "begins, and register it"
)
_NOTHING: Mapping[str, Any] = MappingProxyType({})
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Key = TypeVar("Key")


class Contents:
    """Of one rank; each has its own.

    Args:
        models: those whose weights are saved, by name, with or without wrappers; asked for when
            they are there.
        roots: what else the training has, by name; the variables of a loop come by themselves.
        saved, known, without, all_buffers: see :class:`Census`.
        world_size: of the ranks that train.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, Any]] = dict,
        roots: Callable[[], Mapping[str, Any]] = dict,
        *,
        saved: Callable[[], Iterable[Any]] = tuple,
        known: Mapping[str, str] = KNOWN,
        without: Mapping[str, Collection[str]] = _NOTHING,
        world_size: int = 1,
        all_buffers: bool = False,
    ) -> None:
        self._models, self._roots = models, roots
        self._world_size = world_size
        self._versions: dict[int, int] = {}
        self._functions: Sequence[CodeType] = ()
        self._loops: set[object] = set()
        self._waits: Mapping[str, Any] = {}
        self._known: set[int] | None = None
        self._new_rank: int | None = None
        self._census = Census(
            self._all_roots,
            models=self._modules,
            saved=saved,
            known=known,
            without=without,
            device=self._device,
            all_buffers=all_buffers,
        )

    def note(self) -> None:
        """What will not have changed from now on is as the script makes it."""
        self._census.note()

    def enter_loop(self) -> None:
        """A loop of the script begins: from here on its variables count, and those of the functions
        around it."""
        here = place()
        self._functions = [code for code, _ in here]
        if here not in self._loops:  # an epoch after another begins at the same place
            self._loops.add(here)
            self._census.note()

    def begin(self) -> None:
        """The first step comes next; see :meth:`Census.begin`."""
        self._census.begin()
        self.follow_frozen()

    def state(self) -> dict[str, Any]:
        """Empty, if nothing has changed."""
        found = self._census.state()
        return {"objects": found, "world_size": self._world_size} if found else {}

    def restore(self, state: Mapping[str, Any], *, new_rank: int | None = None) -> None:
        """Put back what has a place by now; the variables of a loop have to wait for it.

        Args:
            new_rank: as of :meth:`Census.restore`.
        """
        if not state:
            return
        self._new_rank = new_rank
        is_resized = state["world_size"] != self._world_size
        rest = self._census.restore(state["objects"], is_resized=is_resized, new_rank=new_rank)
        self._waits = {**state, "objects": rest} if rest else {}

    def restore_waiting(self) -> None:
        """In a loop that goes on where the run was stopped: put the rest back."""
        if self._waits:
            self.restore(self._waits, new_rank=self._new_rank)

    def unkept(self) -> list[Unkept]:
        """As :meth:`Census.unkept`; with what was saved of variables that this script does not
        have."""
        waits, self._waits = self._waits, {}
        why = "is in the checkpoint, and this script has no such object any more"
        lost = [Unkept(path, "saved", why) for path in waits.get("objects", ())]
        return [*lost, *self._census.unkept()]

    def take_lost(self) -> list[Unkept]:
        """As :meth:`Census.take_lost`; with optimizers that were made since the first step."""
        return [*self._census.take_lost(), *self._new_optimizers()]

    def accept_optimizers(self) -> None:
        """The first step is checked: what it has is known."""
        self._known = {id(one) for one in self._census.optimizers.values()}

    def _new_optimizers(self) -> Iterator[Unkept]:
        if self._known is None:
            return
        given = list(self._models().values())
        self._known.update(map(id, [*given, *(getattr(one, "optimizer", None) for one in given)]))
        for path, one in self._census.optimizers.items():
            if one.state and id(one) not in self._known:
                self._known.add(id(one))
                yield Unkept(path, type(one).__name__, _NOT_GIVEN)

    def follow_frozen(self) -> None:
        """From here on a frozen weight does not change."""
        self._versions.clear()
        self.frozen()

    def frozen(self) -> set[int]:
        """Where in memory the weights are that are not trained, and that nothing else has changed
        since they were seen here first, as it would a teacher's."""
        found = set()
        for model in self._modules().values():
            for weight in model.parameters():
                if weight.requires_grad or is_lazy(weight):
                    continue
                place, version = local_of(weight).data_ptr(), weight._version
                if self._versions.setdefault(place, version) == version:
                    found.add(place)
        return found

    def _all_roots(self) -> dict[str, Any]:
        return {**self._roots(), **in_reach(self._functions)}

    def _modules(self) -> dict[str, torch.nn.Module]:
        found = {name: bare(one) for name, one in self._models().items()}
        return {name: one for name, one in found.items() if isinstance(one, torch.nn.Module)}

    def _device(self) -> torch.device:
        for model in self._modules().values():
            for some in (*model.parameters(), *model.buffers()):
                return some.device
        return torch.device("cpu")


def largest(state: Mapping[str, Any]) -> str | None:
    """The values that are most of what is saved so, in words, if it is much: each rank writes its
    own into each checkpoint."""
    sizes = {
        f"{shown(path)}.{name}": size
        for path, values in state.get("objects", {}).items()
        for name, (value, _) in values.items()
        if (size := size_bytes(value))
    }
    if (total := sum(sizes.values())) < _MUCH_BYTES:
        return None
    most = sorted(sizes, key=lambda name: -sizes[name])[:3]
    names = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in most)
    return f"{names}, of {total / 2**20:.0f} MiB in attributes"


def fingerprint(weights: Mapping[Key, Any]) -> dict[Key, int]:
    """A sum of the bits of each weight and buffer, which differs once something else is in their
    place. Counters of versions would not see a write through ``.data``, nor BatchNorm's own."""
    sums: dict[Key, torch.Tensor] = {}
    for name, value in weights.items():
        local = local_of(value)
        plain = isinstance(local, torch.Tensor) and local.layout is torch.strided
        if plain and local.numel() and not local.is_quantized:
            flat = local.detach().reshape(-1)
            integers = _INTEGERS.get(flat.element_size(), torch.uint8)  # of wider ones, bytes
            sums[name] = flat.view(integers).sum(dtype=torch.int64)
    found = torch.stack([one.cpu() for one in sums.values()]).tolist() if sums else []
    return dict(zip(sums, found, strict=True))
