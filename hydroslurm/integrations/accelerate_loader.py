"""A loader that accelerate has prepared: what the order of its next epoch is made of, and, of one
that is trained from, its position.

accelerate fetches one batch ahead, to know which one is the last, and shuffles by a seed that it
takes from torch when the loader is made and a count of epochs; none of these is in its own
checkpoints.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hydroslurm.data.epochs import samplers
from hydroslurm.data.loader_state import LoaderState
from hydroslurm.integrations.framework import FrameworkSession
from hydroslurm.integrations.held_loader import HeldLoader


class PreparedLoader:
    """One that each attempt iterates from its beginning, in the order that an epoch in which an
    attempt begins would have had; from :meth:`hold` on it has a position.

    Args:
        run: resumed already, if there was something to resume from.
        own: what ``accelerator.prepare()`` has made, or any other loader.
        name: of its state.

    Attributes:
        number: of several, in the order in which the script gave them.
        current: the newest iteration, where the loop is the script's own.
        resumes: the next iteration resumes where one was saved.
        is_left: that epoch has a batch left.
        to_iterate: the loader that is to be iterated. That is accelerate's own where it fetches
            from a loader of this process, which is held in its place.
    """

    def __init__(
        self, run: FrameworkSession, own: Any, *, name: str = "train", number: int = 0
    ) -> None:
        self.number = number
        self.current: Any = None
        self.resumes, self.is_left = False, True
        self.own = self.to_iterate = own
        self._run, self._name = run, name
        base = getattr(own, "base_dataloader", None)
        self._base = own if base is None else base
        self._seeded = [one for one in samplers(self._base) if hasattr(one, "initial_seed")]
        for sampler in self._seeded:
            if sampler.generator is None:  # it makes one when it is iterated; a state wants it
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(sampler.initial_seed)
        self._objects = LoaderState(self._base)
        self._held: HeldLoader | None = None
        self._is_in_place = self._base is not own and not _is_dispatched(own)
        self._is_opened = False
        self._rng_types: Any = None
        run.contents.parts[f"loader {name}"] = self

    @property
    def is_held(self) -> bool:
        """Whether it has a position."""
        return self._held is not None

    @property
    def held(self) -> HeldLoader:
        """Its position."""
        assert self._held is not None
        return self._held

    @property
    def iteration(self) -> int:
        """Epochs that were begun before this one."""
        return int(getattr(self.own, "iteration", 0))

    @iteration.setter
    def iteration(self, number: int) -> None:
        if hasattr(self.own, "iteration"):
            self.own.iteration = number

    def hold(self) -> None:
        """Keep its position from now on, and go on where it was saved.

        Raises:
            UsageError: as :func:`hydroslurm.data.position.position_of`.
        """
        own, run = self.own, self._run
        saved = run.own_loaded.get(f"loader {self._name}")
        if saved is not None:
            self._resume(saved)
        if self._is_in_place:
            self._held = run.hold(
                self._base,
                name=self._name,
                epoch=lambda: self.iteration,
                fetched_ahead=lambda: not own.end_of_dataloader,
            )
            own.base_dataloader = self._held.stand_in
        else:
            self._held = run.hold(
                own if self._base is own else _Iterated(own),
                name=self._name,
                epoch=lambda: self.iteration,
            )
            self.to_iterate = self._held.stand_in

    def open(self) -> bool:
        """Go to the place where it was saved, before random numbers are restored.

        Returns:
            False if nothing is left of that epoch: do not iterate it.
        """
        self._is_opened = True
        if not self.held.open_resumed():
            return False
        # what ranks exchange where they begin an epoch, they have exchanged before the save
        self._rng_types = getattr(self.own, "rng_types", None)
        if self._rng_types is not None:
            self.own.rng_types = None
        return True

    def is_iterated(self) -> None:
        """The iteration that was opened has begun."""
        if self._rng_types is not None:
            self.own.rng_types, self._rng_types = self._rng_types, None

    def begin_anew(self) -> None:
        """The next iteration begins an epoch, also where one was opened that nobody has asked for
        a batch."""
        self.is_iterated()
        self.held.forget_opened()

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """An iteration of accelerate's loader that begins within has no position."""
        if self._held is None or not self._is_in_place:
            yield
            return
        self.own.base_dataloader = self._base
        try:
            yield
        finally:
            self.own.base_dataloader = self._held.stand_in

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "seeds": [int(one.initial_seed) for one in self._seeded],
            "objects": self._objects.now(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """When the training begins: what the script has iterated before that, it iterates at the
        beginning of each attempt. The position of one that was opened has its generators.

        Raises:
            StateMismatch: the loader has other generators than it had.
        """
        if self._held is None:
            self._resume(state)
        if not self._is_opened:
            self._objects.put(state["objects"])

    def _resume(self, state: Mapping[str, Any]) -> None:
        self.iteration = state["iteration"]
        for sampler, seed in zip(self._seeded, state["seeds"], strict=False):
            sampler.initial_seed = seed


class _Iterated:
    """A loader of which nothing but its batches is to be asked: accelerate's dispatcher has the
    methods of a stateful loader, and no state."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return getattr(self._loader, name)


def _is_dispatched(loader: Any) -> bool:
    """Whether one rank fetches the batches of several, each of them ahead."""
    state = getattr(loader, "state", None)
    is_dispatcher = any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__)
    return is_dispatcher and getattr(state, "num_processes", 1) > 1
