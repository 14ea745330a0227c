"""Where a training loop is in its data, and the random numbers that belong to that place."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from hydroslurm.checkpoint import rng
from hydroslurm.data.position import LoaderPosition, SamplerPosition, position_of
from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.training.objects import Loading


class Cursor:
    """The position of one loop, from one batch to the next.

    Attributes:
        step, epoch: completed steps, and the epoch that is being trained, from 0.
        position: in the loader; None for a loop without one.
        in_epoch: an epoch was opened and not closed yet.
        loader: that position's. loading: how it makes batches.
        registered: what this rank saves besides.
    """

    def __init__(self) -> None:
        self.step = self.epoch = 0
        self.position: LoaderPosition | None = None
        self.in_epoch = False
        self.loading = Loading()
        self.loader: Any = None
        self.registered = PerRank()
        self._accumulate = 1
        self._handed_out = 0
        self._samples_per_batch: int | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._begins_from: Mapping[str, Any] | None = None

    def use(self, loader: Any, *, rank: int = 0, world_size: int = 1) -> None:
        """Take batches from this loader, as one rank of several."""
        self.position = position_of(loader, rank=rank, world_size=world_size)
        self.loader = loader
        self.loading = Loading.of(loader)
        batch_size = getattr(loader, "batch_size", None)
        if isinstance(batch_size, int):
            self._samples_per_batch = batch_size * world_size

    # --- what is saved
    # --------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """What this rank has to save beside its objects."""
        counters = {"step": self.completed_step(), "epoch": self.epoch}
        if self._loaded is not None and counters == self._loaded["counters"]:
            return self._loaded  # nothing was drawn or read since
        registered = self.registered.states()
        own: dict[str, Any] = {"rng": rng.capture(), "counters": counters}
        if self.position is not None and self.in_epoch:
            own["data"] = self.position.state_dict()
        elif self.position is not None:
            own["objects"] = self.position.loader_state.now()
            if (left := self.position.left_behind()) is not None:
                own["left_behind"] = left
        if registered:
            own["registered"] = registered
        return own

    def saved_apart(self) -> list[Any]:
        """What has a place of its own in a checkpoint."""
        return [self.loader, *self.registered.generators.values()]

    def load(self, own: Mapping[str, Any]) -> None:
        """Go on from there: at the next :meth:`open`, or at once without a loader.

        Raises:
            StateMismatch: it has no state for what is registered, or one that does not fit.
        """
        self.registered.load(own.get("registered", {}))
        self._loaded = own
        if self.position is None:
            self.restore_rng()
        self._begins_from = own

    def begin_steps(self, *, left: int) -> None:
        """A loop without a position begins, with so many steps left. What the script has drawn
        since it was resumed at this step, to build its objects or iterators, was not drawn there
        by a run that was left alone."""
        resumed = self._begins_from
        if resumed is not None and left >= 0:
            if {"step": self.step, "epoch": self.epoch} == resumed["counters"]:
                self._loaded = resumed
            self.restore_rng()

    def restore_rng(self) -> None:
        """Put the loaded random numbers back, once."""
        self._begins_from = None
        if self._loaded is not None:
            rng.restore(self._loaded["rng"])
            self.registered.rewind(
                self._loaded.get("registered", {}), new_rank=self._loaded.get("new_rank")
            )
            if self.position is not None and "objects" in self._loaded:  # between two epochs
                self.position.loader_state.put(self._loaded["objects"])
            self._loaded = None

    def restore_between(self) -> None:
        """As :meth:`restore_rng`, for a state that was saved between two epochs: no iterator is to
        be waited for."""
        if self._loaded is not None and "data" not in self._loaded:
            self.restore_rng()

    # --- the way through an epoch
    # --------------------------------------------------------------------------------------------

    def batches(self, *, accumulate: int) -> Iterator[Any]:
        """The batches that are left of this epoch, each counted as it is handed out."""
        self._accumulate = accumulate
        for batch in self._open():
            self._handed_out += 1
            yield batch

    def hand_out_step(self) -> None:
        """A loop without a position hands out a step, whose batches are the script's own."""
        self._accumulate = self._handed_out = 1

    def samples_per_step(self) -> int | None:
        """Of all ranks together, in a step of full batches; None where the loader does not say."""
        known = self._samples_per_batch
        return None if known is None else known * self._accumulate

    def share_of_batch(self) -> tuple[int, int]:
        """Of the batch at hand: this rank's samples, and those of all ranks."""
        assert isinstance(self.position, SamplerPosition)
        return self.position.share_of_batch()

    @property
    def step_is_full(self) -> bool:
        """Whether all batches of a step have been handed out."""
        return self._handed_out == self._accumulate

    @property
    def step_has_begun(self) -> bool:
        """Whether any batch was handed out that no step has counted yet."""
        return self._handed_out > 0

    def count_step(self) -> None:
        """The batches that were handed out have become a step."""
        self._handed_out = 0
        self.step += 1

    def drop_step(self) -> None:
        """The batches that were handed out count for nothing."""
        self._handed_out = 0

    def completed_step(self) -> int:
        """The step that the state stands for. In the body of the loop the batch at hand counts
        already, so it must be trained by now.

        Raises:
            UsageError: in the middle of a step of several batches.
        """
        if self._handed_out in (0, self._accumulate):
            return self.step + bool(self._handed_out)
        raise UsageError(
            f"{self._handed_out} of the {self._accumulate} batches of step {self.step + 1} have "
            "been handed out: a save between them would lose their gradients. Save behind the last"
        )

    def _open(self) -> Iterator[Any]:
        assert self.position is not None
        data = (self._loaded or {}).get("data")
        if data is None:
            if (left := (self._loaded or {}).get("left_behind")) is not None:
                self.position.resume_epoch(left)
            self.restore_rng()  # saved between two epochs: a new iterator is still to draw from it
            batches = self.position.begin_epoch(self.epoch)
        else:
            batches = self.position.resume_epoch(data)
            self.restore_rng()  # saved within one, after its iterator had drawn
        self.in_epoch = True
        return batches


class PerRank:
    """What each rank registers and saves for itself, by name: random generators, environments."""

    def __init__(self) -> None:
        self.generators: dict[str, rng.Generator] = {}
        self._objects: dict[str, Any] = {}

    def add(self, name: str, thing: Any) -> None:
        """Register a generator, or an object with ``state_dict`` and ``load_state_dict``.

        Raises:
            UsageError: a generator that has no state.
        """
        if isinstance(thing, random.SystemRandom):
            raise UsageError(
                f"{name!r} is a SystemRandom, which draws from the operating system and has no "
                "state to resume from; use random.Random(seed)"
            )
        if isinstance(thing, rng.KINDS):
            self.generators[name] = thing
        else:
            self._objects[name] = thing

    def names(self) -> tuple[str, ...]:
        return (*self._objects, *self.generators)

    def by_name(self) -> dict[str, Any]:
        """The objects and the generators."""
        return {**self._objects, **self.generators}

    def states(self) -> dict[str, Any]:
        """Name -> state, as it is now."""
        return {
            **{name: thing.state_dict() for name, thing in self._objects.items()},
            **{name: rng.state_of(one) for name, one in self.generators.items()},
        }

    def load(self, states: Mapping[str, Any]) -> None:
        """Give the objects their states; the generators have theirs from :meth:`rewind`.

        Raises:
            StateMismatch: one is missing, or does not fit.
        """
        if missing := [name for name in self.names() if name not in states]:
            raise StateMismatch(
                f"the checkpoint has no state of this rank for {', '.join(missing)}; it has "
                f"{', '.join(states) or 'none'}. Was it written before they were registered? Use "
                "another directory= to start anew"
            )
        for name, thing in self._objects.items():
            try:
                thing.load_state_dict(states[name])
            except (RuntimeError, ValueError, KeyError, TypeError) as error:
                raise _misfit(name, thing, error) from error

    def rewind(self, states: Mapping[str, Any], *, new_rank: int | None = None) -> None:
        """Put the generators back.

        Args:
            new_rank: the states are of rank 0, and this rank, which had none, begins streams of
                its own from them.

        Raises:
            StateMismatch: a state is of another kind of generator.
        """
        for name, one in self.generators.items():
            try:
                rng.set_state(one, states[name])
            except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise _misfit(name, one, error) from error
            if new_rank is not None:
                rng.diverge(one, new_rank)


def _misfit(name: str, thing: Any, error: Exception) -> StateMismatch:
    return StateMismatch(
        f"the checkpoint's state of {name!r} does not fit a {type(thing).__name__}: {error}"
    )
