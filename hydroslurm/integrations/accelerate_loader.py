"""A loader that accelerate has prepared: what the order of its next epoch is made of, and, of one
that is trained from, its position.

accelerate fetches one batch ahead, to know which one is the last, and shuffles by a seed that it
takes from torch when the loader is made and a count of epochs; none of these is in its own
checkpoints.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from hydroslurm.data.epochs import samplers
from hydroslurm.data.loader_state import LoaderState
from hydroslurm.errors import UsageError
from hydroslurm.integrations.framework_run import FrameworkRun
from hydroslurm.integrations.held_loader import (
    StandIn,
    count_rest,
    count_whole,
    forget_opened,
    open_resumed,
    skip,
)


class CountedLoader:
    """One that each attempt iterates from its beginning: an epoch in which an attempt begins is in
    the order that it would have had.

    Args:
        run: resumed already, if there was something to resume from.
        loader: what ``accelerator.prepare()`` has made, or any other loader.
        name: of its state.
    """

    def __init__(self, run: FrameworkRun, loader: Any, *, name: str) -> None:
        self._loader = loader
        base = getattr(loader, "base_dataloader", None)
        self._base = loader if base is None else base
        self._seeded = [one for one in samplers(self._base) if hasattr(one, "initial_seed")]
        for sampler in self._seeded:
            if sampler.generator is None:  # it makes one when it is iterated; a state wants it
                sampler.generator = torch.Generator()
                sampler.generator.manual_seed(sampler.initial_seed)
        self._objects = LoaderState(self._base)
        run.own[f"loader {name}"] = self

    @property
    def iteration(self) -> int:
        """Epochs that were begun before this one."""
        return int(getattr(self._loader, "iteration", 0))

    @iteration.setter
    def iteration(self, number: int) -> None:
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = number

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "seeds": [int(one.initial_seed) for one in self._seeded],
            "objects": self._objects.now(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """When the training begins: what the script has iterated before that, it iterates at the
        beginning of each attempt.

        Raises:
            StateMismatch: the loader has other generators than it had.
        """
        self._resume(state)
        self._objects.put(state["objects"])

    def _resume(self, state: Mapping[str, Any]) -> None:
        self.iteration = state["iteration"]
        for sampler, seed in zip(self._seeded, state["seeds"], strict=False):
            sampler.initial_seed = seed


class HeldTrainLoader(CountedLoader):
    """One that is trained from. Arguments as of :class:`CountedLoader`.

    Attributes:
        to_iterate: the loader that is to be iterated. That is accelerate's own where it fetches
            from a loader of this process, which is held in its place.

    Raises:
        UsageError: as :func:`hydroslurm.data.position.position_of`.
    """

    def __init__(self, run: FrameworkRun, loader: Any, *, name: str = "train") -> None:
        super().__init__(run, loader, name=name)
        self._rng_types: Any = None
        self._is_opened = False
        saved = run.own_loaded.get(f"loader {name}")
        if saved is not None:
            self._resume(saved)
        self._is_in_place = self._base is not loader and not _is_dispatched(loader)
        if self._is_in_place:
            self._held = run.hold(
                self._base,
                name=name,
                epoch=lambda: loader.iteration,
                fetched_ahead=lambda: not loader.end_of_dataloader,
            )
            loader.base_dataloader = self._held
            self.to_iterate = loader
        else:
            self._held = run.hold(
                loader if self._base is loader else _Iterated(loader),
                name=name,
                epoch=lambda: getattr(loader, "iteration", 0),
            )
            self.to_iterate = self._held

    def open(self) -> bool:
        """Go to the place where it was saved, before random numbers are restored.

        Returns:
            False if nothing is left of that epoch: do not iterate it.
        """
        self._is_opened = True
        if not open_resumed(self._held):
            return False
        # what ranks exchange where they begin an epoch, they have exchanged before the save
        self._rng_types = getattr(self._loader, "rng_types", None)
        if self._rng_types is not None:
            self._loader.rng_types = None
        return True

    def is_iterated(self) -> None:
        """The iteration that was opened has begun."""
        if self._rng_types is not None:
            self._loader.rng_types, self._rng_types = self._rng_types, None

    def begin_anew(self) -> None:
        """The next iteration begins an epoch, also where one was opened that nobody has asked for
        a batch."""
        self.is_iterated()
        forget_opened(self._held)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """An iteration of accelerate's loader that begins within has no position."""
        if not self._is_in_place:
            yield
            return
        self._loader.base_dataloader = self._base
        try:
            yield
        finally:
            self._loader.base_dataloader = self._held

    def batches_of_epoch(self) -> int | None:
        """Of the one that is resumed, where another number of ranks had begun it: those that were
        used and those that are left now, which is its length until :meth:`leave_epoch`."""
        return len(self._held) if count_rest(self._held) else None

    def leave_epoch(self) -> None:
        """The next epoch has the usual length."""
        count_whole(self._held)

    def skip(self, count: int) -> None:
        """Let the next epoch begin behind its first ``count`` batches."""
        skip(self._held, count)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is left to do for one that was opened, whose position has its generators."""
        if not self._is_opened:
            self._objects.put(state["objects"])


class ScriptLoader(StandIn):
    """A prepared loader in the script's hands."""

    def __init__(self, loader: Loader, iterate: Callable[[Loader], Iterator[Any]]) -> None:
        super().__init__(loader.own)
        self._hydroslurm_iterate = partial(iterate, loader)

    def __iter__(self) -> Iterator[Any]:
        return self._hydroslurm_iterate()


class Loader:
    """One of them.

    Attributes:
        own: accelerate's.
        held: what keeps its position, once it is trained from.
        current: its newest iteration.
        resumes: its next iteration goes on where one was saved.
        is_left: there is a batch in the epoch of that one.
    """

    def __init__(self, own: Any, number: int) -> None:
        self.own = own
        self.number = number
        self.held: HeldTrainLoader | None = None
        self.current: Iteration | None = None
        self.resumes = False
        self.is_left = True

    @property
    def name(self) -> str:
        """As a person counts them."""
        return f"loader {self.number + 1} of those that prepare() was given"

    @property
    def is_under_way(self) -> bool:
        """Whether an iteration that has a position is not at its end, and the script still has it;
        one that a resumed script is still to make, too."""
        one = self.current
        return self.resumes or (one is not None and not one.ended and one.batches() is not None)


class Iteration:
    """One way through a loader.

    Attributes:
        resumes: it goes on where one was saved.
        may_lead: its batches are trained on. is_held: it has a position. ended: it has no more.
        batches: what the script has; None once it has it no more.
    """

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.resumes, loader.resumes = loader.resumes, False
        if self.resumes:
            loader.current = self
        self.may_lead = self.is_held = self.ended = False
        self.batches: Any = lambda: None


def require_known(loader: Any, state: Any) -> None:
    """Whether this is what is known of accelerate's loaders, and of its state of gradients.

    Raises:
        UsageError: names what is not there.
    """
    names = ("iteration", "end_of_dataloader", "remainder", "end", "base_dataloader")
    missing = [f"{type(loader).__name__}.{name}" for name in names if not hasattr(loader, name)]
    if not hasattr(state, "dataloader_references"):
        missing.append("GradientState.dataloader_references")
    if missing:
        version = getattr(sys.modules.get("accelerate"), "__version__", "?")
        raise UsageError(
            f"accelerate {version} has no {', '.join(missing)}; hydroslurm knows 1.0 to 1.15. "
            "Install one of those, or save and resume with accelerate"
        )


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
