"""A loader in a framework's hands, whose position in the data is saved and resumed.

A batch that the framework has fetched ahead of the step that uses it is saved itself where the
first one would come back as it was: tensors on the CPU and plain values. Any other is fetched again
by the next attempt, for which the random numbers and the loader's objects have to be noted before
each batch.
"""

from __future__ import annotations

import itertools
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.plain import tensors_in
from hydroslurm.checkpoint.tree import encode
from hydroslurm.data.epochs import later_batches
from hydroslurm.data.position import position_of
from hydroslurm.errors import StateMismatch, UnsavableState

MOST_BYTES = 64 * 2**20
"""Of a first batch. Noting random numbers costs nothing beside the fetching of a larger one."""
_NONE = object()


class StandIn:
    """Is taken for a loader: attributes are those of the other, and so is the class that
    isinstance() sees, for scripts ask for a DataLoader."""

    def __init__(self, loader: Any) -> None:
        self._hydroslurm_loader = loader

    def __len__(self) -> int:
        return len(self._hydroslurm_loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hydroslurm_loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_hydroslurm_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._hydroslurm_loader, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self._hydroslurm_loader.__class__  # type: ignore[no-any-return]


class _Fetched:
    """The newest batch; or what belongs to the place before it, where batches are not saved. An
    object of its own, for the loader's attributes lead through its __setattr__."""

    def __init__(self) -> None:
        self.newest: Any = _NONE
        self.before: dict[str, Any] | None = None


class HeldLoader(StandIn):
    """Stands in for a loader: the framework iterates this one instead, and sees no difference.

    The first iteration goes on where ``resumed`` was; each other one begins an epoch. A framework
    that fetches batches ahead of the step that uses them says so with ``fetched_ahead``: a batch
    that was fetched and not used is saved, or fetched again from the same random numbers.

    Args:
        loader: any that :func:`hydroslurm.data.position.position_of` takes.
        epoch: the number of the epoch that begins; for samplers and data sets that want to know.
        fetched_ahead: how many batches were handed out and are not used yet, 0 or 1; asked when
            the position is saved. None: always 0.
        rank, world_size: of this process.
        resumed: what :meth:`state_dict` gave, to go on from; None begins.
    """

    def __init__(
        self,
        loader: Any,
        *,
        epoch: Callable[[], int],
        fetched_ahead: Callable[[], int] | None = None,
        rank: int = 0,
        world_size: int = 1,
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(loader)
        self._hydroslurm_epoch = epoch
        self._hydroslurm_ahead = fetched_ahead
        self._hydroslurm_position = position_of(loader, rank=rank, world_size=world_size)
        self._hydroslurm_resumed = self._for_this_world(resumed, world_size)
        self._hydroslurm_fetched = _Fetched()
        self._hydroslurm_saves_batches: bool | None = None
        self._hydroslurm_opened: Iterator[Any] | None = None
        self._hydroslurm_length: int | None = None
        self._hydroslurm_began_at = 0

    def __iter__(self) -> Iterator[Any]:
        opened, self._hydroslurm_opened = self._hydroslurm_opened, None
        if opened is not None:
            return opened
        resumed, self._hydroslurm_resumed = self._hydroslurm_resumed, None
        self._hydroslurm_began_at = 0
        if resumed is None:
            # both that an iterator draws, a seed for workers and one for the order, come together:
            # with several loaders one would else draw between what another draws
            batches: Iterator[Any] = later_batches(
                lambda: self._hydroslurm_position.begin_epoch(self._hydroslurm_epoch())
            )
            return self._remembering(batches, None) if self._hydroslurm_ahead else batches
        self._hydroslurm_began_at = resumed["position"]["batches"] - ("ahead" in resumed)
        batches = self._hydroslurm_position.resume_epoch(resumed["position"])
        if not self._hydroslurm_ahead:
            return batches
        if "ahead" in resumed:
            self._hydroslurm_fetched.newest = batch = unpacked(resumed["ahead"])
            return itertools.chain([batch], self._remembering(batches, None))
        return self._remembering(batches, resumed.get("rng"))

    def __len__(self) -> int:
        length = self._hydroslurm_length
        return len(self._hydroslurm_loader) if length is None else length

    def _for_this_world(
        self, resumed: Mapping[str, Any] | None, world_size: int
    ) -> Mapping[str, Any] | None:
        """What another number of ranks has saved is the first rank's for all: a batch that each had
        fetched ahead is fetched again, by whoever gets it now."""
        position = (resumed or {}).get("position", {})
        is_inside = position.get("begun") and not position.get("finished")
        if resumed is None or not is_inside or position.get("world_size") == world_size:
            return resumed
        if "ahead" in resumed:
            position = self._hydroslurm_position.without_newest(position)
        return {"position": position}

    def _remembering(self, batches: Iterator[Any], before: Any) -> Iterator[Any]:
        """Hand on batches; keep the newest one, or what belongs to the place before it.

        Args:
            before: random numbers to fetch the first one with; None: those that are there.
        """
        if before is not None:
            rng.restore(before)
        fetched = self._hydroslurm_fetched
        while True:
            place: dict[str, Any] | None = None
            if not self._hydroslurm_saves_batches:
                place = {"position": self._hydroslurm_position.state_dict(), "rng": rng.capture()}
            try:
                batch = next(batches)
            except StopIteration:
                fetched.newest, fetched.before = _NONE, None
                return
            if self._hydroslurm_saves_batches is None:
                self._hydroslurm_saves_batches = is_saved(batch)
            if self._hydroslurm_saves_batches:
                fetched.newest, fetched.before = batch, None
            else:
                fetched.newest, fetched.before = _NONE, place
            yield batch


def open_resumed(loader: HeldLoader) -> bool:
    """Begin the iteration that goes on where it was saved, ahead of the framework, and fetch the
    batch that had been fetched ahead. Random numbers are to be restored after this; then the
    framework's first ``next()`` draws what it drew after the save.

    Returns:
        False if nothing is left of that epoch: the framework's next iteration begins another one.
    """
    resumed = loader._hydroslurm_resumed or {"position": {}}
    batches = iter(loader)
    if resumed["position"].get("finished"):
        return False
    fetched = list(itertools.islice(batches, 1)) if "rng" in resumed else []
    loader._hydroslurm_opened = itertools.chain(fetched, batches)
    return True


def forget_opened(loader: HeldLoader) -> None:
    """Let the next iteration begin an epoch, whatever was opened."""
    loader._hydroslurm_opened = loader._hydroslurm_resumed = None


def leave_resumed(loader: HeldLoader) -> None:
    """Let the next iteration begin an epoch: the one that was saved is over. Its generators are put
    back, and nothing of it is fetched again."""
    resumed = loader._hydroslurm_resumed
    if resumed is not None:
        loader._hydroslurm_resumed = {"position": {**resumed["position"], "finished": True}}
        iter(loader)


def skip(loader: HeldLoader, count: int) -> None:
    """Let the next iteration begin behind its first ``count`` batches. They are not fetched before
    it begins: only then does the framework say which epoch it is."""
    batches = iter(loader)
    loader._hydroslurm_opened = later_batches(lambda: itertools.islice(batches, count, None))


def count_rest(loader: HeldLoader) -> bool:
    """Where another number of ranks had begun the epoch that is to be resumed, let the loader's
    length be the batches that were used and those that are left for this number of ranks; whether
    it is another one now."""
    position = (loader._hydroslurm_resumed or {}).get("position")
    if position is not None:
        loader._hydroslurm_length = loader._hydroslurm_position.batches_of_epoch(position)
    return loader._hydroslurm_length is not None


def count_whole(loader: HeldLoader) -> None:
    """Let the length be that of a whole epoch again."""
    loader._hydroslurm_length = None


def samples_taken(loader: HeldLoader) -> int | None:
    """Of this rank, since the epoch was begun or resumed: full batches, without those that were
    fetched ahead. None where the loader does not say how large a batch is."""
    own, ahead = loader._hydroslurm_loader, loader._hydroslurm_ahead
    indexes: Any = getattr(own, "batch_sampler", None)
    size = getattr(own if indexes is None else indexes, "batch_size", None)
    if not isinstance(size, int):
        return None
    if getattr(indexes, "split_batches", False):  # it is that of all ranks there
        size //= indexes.num_processes
    taken = loader._hydroslurm_position.state_dict()["batches"] - loader._hydroslurm_began_at
    return int(taken - (ahead() if ahead else 0)) * size


def held_state(loader: HeldLoader) -> dict[str, Any]:
    """The position between two steps: batches that were used, and no others."""
    if loader._hydroslurm_resumed is not None:  # not iterated since
        return dict(loader._hydroslurm_resumed)
    position, ahead = loader._hydroslurm_position, loader._hydroslurm_ahead
    if ahead is None or not ahead():
        return {"position": position.state_dict()}
    fetched = loader._hydroslurm_fetched
    if fetched.before is not None:
        return fetched.before
    if fetched.newest is not _NONE:
        return {"position": position.state_dict(), "ahead": packed(fetched.newest)}
    return {"position": position.state_dict()}


def is_saved(first: Any) -> bool:
    """Whether the batches of a loader are saved, of which this is one; all are, or none."""
    try:
        state = packed(first)
    except UnsavableState:
        return False
    return sum(one.nbytes for one in tensors_in(state)) <= MOST_BYTES


def packed(batch: Any) -> dict[str, Any]:
    """What is saved of a batch, of which nothing is copied; :func:`unpacked` gives it back.

    Raises:
        UnsavableState: it would not come back as it is.
    """
    state: dict[str, Any] = {"batch": batch, "class": None}
    if isinstance(batch, UserDict):
        state = {"batch": batch.data, "class": [type(batch).__module__, type(batch).__qualname__]}
        if _class_of(state) is not type(batch) or not _is_of_data(batch):
            raise UnsavableState(
                f"a batch is a {type(batch).__name__}, which cannot be made anew from its items"
            )
    encode(state, prefix="batch")
    for one in tensors_in(state):
        if one.device.type != "cpu" or one.requires_grad or type(one) is not torch.Tensor:
            raise UnsavableState(
                f"a batch holds a {type(one).__name__} on {one.device} (requires_grad="
                f"{one.requires_grad}); only plain tensors on the CPU come back as they were"
            )
    return state


def unpacked(state: Mapping[str, Any]) -> Any:
    """The batch.

    Raises:
        StateMismatch: its class is not there any more.
    """
    if state["class"] is None:
        return state["batch"]
    kind = _class_of(state)
    if kind is None:
        raise StateMismatch(
            f"the batch that was fetched ahead is a {'.'.join(state['class'])}, which this process "
            "does not have; resume with the same versions of the packages, or begin anew with "
            "another directory="
        )
    return kind(state["batch"])


def _class_of(state: Mapping[str, Any]) -> type | None:
    """A dictionary's class, if it is a UserDict of a module that is loaded: no others are made."""
    module, name = state["class"]
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, UserDict) else None


def _is_of_data(batch: UserDict[Any, Any]) -> bool:
    """Whether its items are all there is to it."""
    try:
        made = type(batch)(batch.data)
    except (TypeError, ValueError):
        return False
    return {**vars(made), "data": None} == {**vars(batch), "data": None}
