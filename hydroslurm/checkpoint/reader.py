"""The files of a checkpoint -> a state, its tensors on the CPU or laid out over the ranks.

Every byte is read once and compared with what was written. Nothing is executed: names, numbers and
shapes are the only things that a file can say, and no memory is taken for a tensor before as many
bytes of it are known to be stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from hydroslurm.checkpoint.checksummed_file import FileEntry, read_checked
from hydroslurm.checkpoint.landing import Landing, land
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tensor_file import (
    SHARED_JSON,
    PartIndex,
    files_of_part,
    frozen_part,
    is_frozen_part,
    parse,
    parts_among,
    require_tensor,
)
from hydroslurm.checkpoint.tree import JsonValue, decode, tensor_keys
from hydroslurm.checkpoint.write_plan import SharedTensor, State
from hydroslurm.errors import CheckpointCorrupt, CheckpointMissing


@dataclass(frozen=True)
class Shared:
    """What all ranks share: the state without its tensors, and what those are, by key."""

    state: dict[str, Any]
    tensors: dict[str, SharedTensor]


class CheckpointFiles:
    """The files of one checkpoint, each compared with the manifest when it is read; an index is
    read once. A part has the number of its rank, or ``tensor_file.frozen_part`` of it."""

    def __init__(self, folder: Path, entries: Mapping[str, FileEntry], *, storage: Storage) -> None:
        self.folder = folder
        self.storage = storage
        self.entries = entries
        self._indexes: dict[int, PartIndex] = {}

    @property
    def ranks(self) -> list[int]:
        """Those that took part in the save."""
        return [number for number in self.parts if not is_frozen_part(number)]

    @property
    def parts(self) -> list[int]:
        """All of them."""
        return parts_among(self.entries)

    def state(
        self,
        *,
        rank: int,
        only: Collection[str] | None = None,
        like: Mapping[str, Any] | None = None,
    ) -> State:
        """Read a state, or the names in ``only``, laid out as ``like`` says.

        A rank that had no part in the save has nothing of its own.

        Raises:
            CheckpointCorrupt: a file is missing or is not what was written.
            CheckpointError: someone else may have written one.
            CheckpointMissing: a name in ``only`` was not saved.
        """
        shared = self.shared()
        state, own = shared.state, self.index(rank).own if rank in self.ranks else {}
        if only is not None:
            missing = sorted(set(only) - set(state) - set(own))
            if missing:
                raise CheckpointMissing(
                    f"{self.folder} has no {', '.join(missing)}; it has {', '.join([*state, *own])}"
                )
            state = {name: value for name, value in state.items() if name in only}
            own = {name: value for name, value in own.items() if name in only}
        layouts: dict[str, torch.Tensor | None] = {}
        for name, value in state.items():
            layouts |= tensor_keys(value, (like or {}).get(name))
        wanted = [*_wanted_of_shared(layouts, shared, self), *_wanted_of_own(own, rank, self)]
        tensors = _landed(self, _landings(self, wanted, first=rank))
        return State(shared=_decoded(state, tensors), own=_decoded(own, tensors))

    def check(self) -> None:
        """Put together all that :meth:`state` reads on any rank, with tensors that have no memory
        in the place of those that are stored. Reads the indexes only.

        Raises:
            CheckpointCorrupt, CheckpointError: as :meth:`state`.
        """
        shared = self.shared()
        keys = tensor_keys(list(shared.state.values()))
        wanted = _wanted_of_shared(keys, shared, self)
        _decoded(shared.state, _without_values(_landings(self, wanted, first=0)))
        for part in self.parts:
            own = self.index(part).own
            wanted = _wanted_of_own(own, part, self)
            _decoded(own, _without_values(_landings(self, wanted, first=part)))

    def own(self, *, rank: int) -> dict[str, Any]:
        """The ``own`` of one rank.

        Raises:
            CheckpointMissing: that rank had no part in the save.
            CheckpointCorrupt, CheckpointError: as :meth:`state`.
        """
        if rank not in self.ranks:
            raise CheckpointMissing(
                f"{self.folder} has nothing of rank {rank}: {len(self.ranks)} ranks saved it"
            )
        own = self.index(rank).own
        wanted = _wanted_of_own(own, rank, self)
        return _decoded(own, _landed(self, _landings(self, wanted, first=rank)))

    def shared(self) -> Shared:
        """Raises CheckpointCorrupt, CheckpointError."""
        text = self._read(SHARED_JSON)
        try:
            shared = msgspec.convert(parse(text), Shared)
            for one in shared.tensors.values():
                require_tensor(one.shape, one.dtype)
        except ValueError as error:
            path = self.folder / SHARED_JSON
            raise CheckpointCorrupt(f"{path} cannot be read: {error!s:.200}") from error
        return shared

    def index(self, part: int) -> PartIndex:
        """Raises CheckpointCorrupt, CheckpointError."""
        if part not in self._indexes:
            path = self.index_path(part)
            self._indexes[part] = PartIndex.from_json(
                self._read(path.name),
                where=path,
                rank=part,
                tensors=self.tensors(part)[1],
            )
        return self._indexes[part]

    def index_path(self, part: int) -> Path:
        return self.folder / files_of_part(part)[0]

    def tensors(self, part: int) -> tuple[Path, FileEntry]:
        """A part's file of tensors. Raises CheckpointCorrupt: there is none."""
        _, name = files_of_part(part)
        return self.folder / name, self._entry(name)

    def _entry(self, name: str) -> FileEntry:
        try:
            return self.entries[name]
        except KeyError:
            raise CheckpointCorrupt(f"{self.folder} has no {name}") from None

    def _read(self, name: str) -> bytes:
        return read_checked(self.folder / name, self._entry(name), storage=self.storage)


def _wanted_of_shared(
    layouts: Mapping[str, torch.Tensor | None], shared: Shared, files: CheckpointFiles
) -> list[Landing]:
    wanted = []
    for key, template in layouts.items():
        one = shared.tensors.get(key)
        if one is None:
            raise CheckpointCorrupt(f"{files.folder / SHARED_JSON} has no tensor {key!r:.80}")
        wanted.append(Landing.of(key, one, template=template))
    return wanted


def _wanted_of_own(
    own: Mapping[str, JsonValue], rank: int, files: CheckpointFiles
) -> list[Landing]:
    keys = tensor_keys(list(own.values()))
    there = {one.key: one for one in files.index(rank).chunks if one.key in keys} if keys else {}
    for key in keys:
        if key not in there:
            raise CheckpointCorrupt(f"{files.index_path(rank)} has no {key!r:.80}")
    return [
        Landing.of(key, SharedTensor(one.shape, one.dtype, rank), template=None)
        for key, one in there.items()
    ]


def _landings(
    files: CheckpointFiles, wanted: Iterable[Landing], *, first: int
) -> dict[str, Landing]:
    """Find all pieces of some tensors, before memory is taken for any.

    Args:
        first: the rank whose part holds, if nothing has changed since the save, what this process
            holds of sharded tensors.
    """
    landings = {one.key: one for one in wanted}
    there, asked = set(files.parts), set[int]()
    while lacking := {key: one for key, one in landings.items() if one.lacking}:
        parts = _likely(lacking.values(), first) & there - asked or there - asked
        if not parts:
            key, one = next(iter(lacking.items()))
            raise CheckpointCorrupt(
                f"the files of {files.folder} lack {one.lacking} of the values of {key!r:.80}"
            )
        part = min(parts)
        asked.add(part)
        where = files.index_path(part)
        for chunk in files.index(part).chunks:
            if chunk.key in lacking:
                lacking[chunk.key].take(part, chunk, where=where)
    return landings


def _landed(files: CheckpointFiles, landings: Mapping[str, Landing]) -> dict[str, torch.Tensor]:
    return land(landings.values(), index=files.index, tensors=files.tensors, storage=files.storage)


def _without_values(landings: Mapping[str, Landing]) -> dict[str, torch.Tensor]:
    return {
        key: torch.empty(one.shape, dtype=one.dtype, device="meta") for key, one in landings.items()
    }


def _decoded(state: Mapping[str, JsonValue], tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: decode(value, tensors) for name, value in state.items()}


def _likely(landings: Iterable[Landing], first: int) -> set[int]:
    """The parts that have what is lacking, if nothing has changed since the save: so that with
    thousands of ranks not everybody reads the indexes of all."""
    found, ranks = set[int](), set[int]()
    for landing in landings:
        if landing.writer is None:
            ranks |= {first, *landing.replicas}
        else:
            found.add(landing.writer)
    return found | ranks | {frozen_part(rank) for rank in ranks}
