"""What a resumed loader cannot promise by itself, said beforehand."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import IterableDataset

from hydroslurm.data import epochs
from hydroslurm.data.generators import own_generators
from hydroslurm.data.seeding import SeededDataset


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
    for sampler in epochs.samplers(loader):
        drawn_from = [name for name, _ in own_generators(sampler)]
        if drawn_from and not callable(getattr(sampler, "load_state_dict", None)):
            name = type(sampler).__name__
            warnings.warn(
                f"{name} draws from {name}.{drawn_from[0]} and has no state_dict(): resumed inside "
                f"an epoch, {type(loader).__name__} takes its samples in another order, so that "
                "some come twice and others never. A plain DataLoader with it, or "
                "sampler=hydroslurm.data.ResumableSampler(dataset), goes on with the same samples",
                stacklevel=4,
            )
