"""What the three ways to hold a position share: counting, naming the epoch, samplers, and
warnings about random numbers that a resume cannot restore."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch.utils.data import IterableDataset

from hydroslurm.checkpoint import rng
from hydroslurm.checkpoint.tree import decode, encode
from hydroslurm.data.sampler import ResumableSampler, Share
from hydroslurm.data.seeding import SeededDataset
from hydroslurm.errors import StateMismatch

FORMAT = 1


@dataclass
class Progress:
    """How far one epoch is. ``batches`` were handed to the training loop; those that workers have
    fetched ahead are not counted. ``finished``: the loop was told that there are no more.
    ``world_size``: the ranks that go through the epoch together."""

    epoch: int = 0
    batches: int = 0
    begun: bool = False
    finished: bool = False
    world_size: int = 1

    def state_dict(self, strategy: str) -> dict[str, Any]:
        return {"format": FORMAT, "strategy": strategy, **asdict(self)}

    @classmethod
    def of(cls, state: Mapping[str, Any], *, strategy: str) -> Progress:
        """Read a state back.

        Raises:
            StateMismatch: it was made by another strategy, or in a newer form.
        """
        if state.get("strategy") != strategy or state.get("format") != FORMAT:
            raise StateMismatch(
                f"the saved data position is of kind {state.get('strategy')!r} (format "
                f"{state.get('format')!r}), the loader of now wants {strategy!r} (format {FORMAT});"
                " give it the kind of loader and sampler that it had, or begin a new run"
            )
        return cls(**{one.name: state[one.name] for one in fields(cls)})

    def require_world(self, world_size: int) -> None:
        """Refuse a place inside an epoch that another number of ranks cannot go on from.

        Raises:
            StateMismatch: names both numbers.
        """
        if self.begun and not self.finished and self.world_size != world_size:
            raise StateMismatch(
                f"the saved data position is inside epoch {self.epoch}, which {self.world_size} "
                f"ranks had begun; now there are {world_size}, and this kind of loader cannot tell "
                f"what is left for them. Go on with {self.world_size} ranks, or give a plain "
                "DataLoader sampler=hydroslurm.data.ResumableSampler(dataset), or torch's "
                "DistributedSampler, which any number of ranks can take up"
            )


class CountedBatches(Iterator[Any]):
    """Hands on batches and counts them in a :class:`Progress`."""

    def __init__(self, batches: Iterator[Any], progress: Progress) -> None:
        self._batches: Iterator[Any] | None = batches
        self._progress = progress

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except StopIteration:
            self._progress.finished = True
            self._batches = None  # lets go of the loader's iterator, and so of its workers
            raise
        self._progress.batches += 1
        return batch


def later_batches(begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """The batches of an iterator that is made when the first one is asked for. No Python is run for
    the others."""
    return itertools.chain.from_iterable(begin() for _ in range(1))


def announce(loader: Any, epoch: int) -> None:
    """Tell a loader's samplers and data set which epoch begins, where they want to know."""
    for part in (*samplers(loader), getattr(loader, "dataset", None)):
        if isinstance(part, ResumableSampler):
            part.start_epoch(epoch)
        elif callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)


def tell(loader: Any, share: Share) -> None:
    """Tell a loader's samplers whose samples they give, where they do not know."""
    for sampler in samplers(loader):
        if isinstance(sampler, ResumableSampler):
            sampler.tell(share)


def copied_state(loader: Any) -> Any:
    """A copy of the state of a loader that keeps one.

    Raises:
        UnsavableState: it holds what a checkpoint cannot; names the place and the type.
    """
    tree, tensors = encode(loader.state_dict(), prefix="loader.state_dict()")
    return decode(tree, {key: tensor.detach().clone() for key, tensor in tensors.items()})


def samplers(loader: Any) -> list[Any]:
    """The samplers of a loader, outermost first, each once."""
    found: list[Any] = []
    for name in ("batch_sampler", "sampler"):
        part = getattr(loader, name, None)
        while part is not None and not any(part is other for other in found):
            found.append(part)
            # a BatchSamplerShard of accelerate's is around another batch sampler
            inner = getattr(part, "sampler", None)
            part = getattr(part, "batch_sampler", None) if inner is None else inner
    return found


def warn_of_unseeded_workers(loader: Any) -> None:
    """Say that random augmentation in workers starts anew with a resume, where it does.

    Nobody can see whether a data set draws random numbers; one that does not is right without
    the wrapper, and may keep it to be rid of the warning.
    """
    dataset = getattr(loader, "dataset", None)
    if not getattr(loader, "num_workers", 0) or isinstance(dataset, SeededDataset):
        return
    advice = (
        "seed in its __iter__ from a counter that its state_dict() keeps"
        if isinstance(dataset, IterableDataset)
        else "wrap it: SeededDataset(dataset)"
    )
    warnings.warn(
        f"{type(dataset).__name__} is read by {loader.num_workers} workers, whose random numbers "
        "start anew when the run is resumed inside an epoch. If it augments at random, a resumed "
        f"run will differ from an uninterrupted one; {advice}",
        stacklevel=4,
    )


def warn_of_samplers_begun_anew(loader: Any) -> None:
    """Say that other samples come with a resume, where StatefulDataLoader iterates a sampler that
    draws from a generator of its own: it does so several times, and keeps the last order."""
    for sampler in samplers(loader):
        drawn_from = [
            name
            for name, one in getattr(sampler, "__dict__", {}).items()
            if isinstance(one, rng.KINDS) and name != "generator"  # torch's samplers know that
        ]
        if drawn_from and not callable(getattr(sampler, "load_state_dict", None)):
            name = type(sampler).__name__
            warnings.warn(
                f"{name} draws from {name}.{drawn_from[0]} and has no state_dict(): resumed inside "
                f"an epoch, {type(loader).__name__} takes its samples in another order, so that "
                "some come twice and others never. A plain DataLoader with it, or "
                "sampler=hydroslurm.data.ResumableSampler(dataset), goes on with the same samples",
                stacklevel=4,
            )
