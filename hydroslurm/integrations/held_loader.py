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
from hydroslurm.checkpoint.tree import encode
from hydroslurm.checkpoint.walk import arrays_in
from hydroslurm.data.epochs import later_batches
from hydroslurm.data.position import position_of
from hydroslurm.errors import StateMismatch, UnsavableState

MOST_BYTES = 64 * 2**20
"""Of a first batch. Noting random numbers costs nothing beside the fetching of a larger one."""
_NONE = object()


class StandIn:
    """Is taken for a loader: attributes are those of the other, and so is the class that
    isinstance() sees, for scripts ask for a DataLoader.

    Args:
        iterate: what iterating it does. length: what ``len()`` gives; by default the loader's own.
    """

    def __init__(
        self,
        loader: Any,
        *,
        iterate: Callable[[], Iterator[Any]],
        length: Callable[[], int] | None = None,
    ) -> None:
        self._hydroslurm_loader = loader
        self._hydroslurm_iterate = iterate
        self._hydroslurm_length = length or (lambda: len(loader))

    def __iter__(self) -> Iterator[Any]:
        return self._hydroslurm_iterate()

    def __len__(self) -> int:
        return self._hydroslurm_length()

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


class HeldLoader:
    """The position of a framework in one of its loaders.

    The first iteration goes on where ``resumed`` was; each other one begins an epoch. A framework
    that fetches batches ahead of the step that uses them says so with ``fetched_ahead``: a batch
    that was fetched and not used is saved, or fetched again from the same random numbers.

    Args:
        loader: any that :func:`hydroslurm.data.position.position_of` takes.
        epoch: the number of the epoch that begins; for samplers and data sets that want to know.
        fetched_ahead: how many batches were handed out and are not used yet, 0 or 1; asked when
            the position is saved. None: always 0.
        rank, world_size: of this process.
        resumed: what :meth:`state` gave, to go on from; None begins.

    Attributes:
        stand_in: what the framework iterates in the loader's place, and sees no difference.
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
        self.stand_in = StandIn(loader, iterate=self._iterate, length=self._batches_of_epoch)
        self._loader, self._epoch, self._ahead = loader, epoch, fetched_ahead
        self._position = position_of(loader, rank=rank, world_size=world_size)
        self._resumed = self._for_this_world(resumed, world_size)
        self._newest: Any = _NONE
        self._before: dict[str, Any] | None = None  # of the newest, where batches are not saved
        self._saves_batches: bool | None = None
        self._opened: Iterator[Any] | None = None
        self._length: int | None = None
        self._began_at = 0

    def open_resumed(self) -> bool:
        """Begin the iteration that goes on where it was saved, ahead of the framework, and fetch
        the batch that had been fetched ahead. Random numbers are to be restored after this; then
        the framework's first ``next()`` draws what it drew after the save.

        Returns:
            False if nothing is left of that epoch: the framework's next iteration begins another.
        """
        resumed = self._resumed or {"position": {}}
        batches = self._iterate()
        if resumed["position"].get("finished"):
            return False
        fetched = list(itertools.islice(batches, 1)) if "rng" in resumed else []
        self._opened = itertools.chain(fetched, batches)
        return True

    def forget_opened(self) -> None:
        """Let the next iteration begin an epoch, whatever was opened."""
        self._opened = self._resumed = None

    def leave_resumed(self) -> None:
        """Let the next iteration begin an epoch: the one that was saved is over. Its generators are
        put back, and nothing of it is fetched again."""
        if self._resumed is not None:
            self._resumed = {"position": {**self._resumed["position"], "finished": True}}
            self._iterate()

    def skip(self, count: int) -> None:
        """Let the next iteration begin behind its first ``count`` batches. They are not fetched
        before it begins: only then does the framework say which epoch it is."""
        batches = self._iterate()
        self._opened = later_batches(lambda: itertools.islice(batches, count, None))

    def count_rest(self) -> bool:
        """Where another number of ranks had begun the epoch that is to be resumed, let the length
        be the batches that were used and those that are left for this number of ranks; whether it
        is another one now."""
        position = (self._resumed or {}).get("position")
        if position is not None:
            self._length = self._position.batches_of_epoch(position)
        return self._length is not None

    def count_whole(self) -> None:
        """Let the length be that of a whole epoch again."""
        self._length = None

    def samples_taken(self) -> int | None:
        """Of this rank, since the epoch was begun or resumed: full batches, without those that were
        fetched ahead. None where the loader does not say how large a batch is."""
        indexes: Any = getattr(self._loader, "batch_sampler", None)
        size = getattr(self._loader if indexes is None else indexes, "batch_size", None)
        if not isinstance(size, int):
            return None
        if getattr(indexes, "split_batches", False):  # it is that of all ranks there
            size //= indexes.num_processes
        taken = self._position.state_dict()["batches"] - self._began_at
        return int(taken - (self._ahead() if self._ahead else 0)) * size

    def state(self) -> dict[str, Any]:
        """The position between two steps: batches that were used, and no others."""
        if self._resumed is not None:  # not iterated since
            return dict(self._resumed)
        is_ahead = self._ahead is not None and self._ahead() > 0
        if is_ahead and self._before is not None:
            return self._before
        position = {"position": self._position.state_dict()}
        is_kept = is_ahead and self._newest is not _NONE
        return {**position, "ahead": packed(self._newest)} if is_kept else position

    # --- inside
    # --------------------------------------------------------------------------------------------

    def _batches_of_epoch(self) -> int:
        return len(self._loader) if self._length is None else self._length

    def _iterate(self) -> Iterator[Any]:
        opened, self._opened = self._opened, None
        if opened is not None:
            return opened
        resumed, self._resumed = self._resumed, None
        self._began_at = 0
        if resumed is None:
            # both that an iterator draws, a seed for workers and one for the order, come together:
            # with several loaders one would else draw between what another draws
            batches: Iterator[Any] = later_batches(
                lambda: self._position.begin_epoch(self._epoch())
            )
            return self._remembering(batches, None) if self._ahead else batches
        self._began_at = resumed["position"]["batches"] - ("ahead" in resumed)
        batches = self._position.resume_epoch(resumed["position"])
        if not self._ahead:
            return batches
        if "ahead" in resumed:
            self._newest = batch = unpacked(resumed["ahead"])
            return itertools.chain([batch], self._remembering(batches, None))
        return self._remembering(batches, resumed.get("rng"))

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
            position = self._position.without_newest(position)
        return {"position": position}

    def _remembering(self, batches: Iterator[Any], before: Any) -> Iterator[Any]:
        """Hand on batches; keep the newest one, or what belongs to the place before it.

        Args:
            before: random numbers to fetch the first one with; None: those that are there.
        """
        if before is not None:
            rng.restore(before)
        while True:
            place: dict[str, Any] | None = None
            if not self._saves_batches:
                place = {"position": self._position.state_dict(), "rng": rng.capture()}
            batch = next(batches, _NONE)
            if batch is _NONE:
                self._newest, self._before = _NONE, None
                return
            if self._saves_batches is None:
                self._saves_batches = is_saved(batch)
            self._newest, self._before = (batch, None) if self._saves_batches else (_NONE, place)
            yield batch


def is_saved(first: Any) -> bool:
    """Whether the batches of a loader are saved, of which this is one; all are, or none."""
    try:
        state = packed(first)
    except UnsavableState:
        return False
    return bool(sum(one.nbytes for one in arrays_in(state)) <= MOST_BYTES)


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
    for one in arrays_in(state):
        if not isinstance(one, torch.Tensor):
            continue
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
