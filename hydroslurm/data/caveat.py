"""The one thing that a resumed loader with workers cannot promise by itself."""

from __future__ import annotations

import warnings
from typing import Any

from torch.utils.data import IterableDataset

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
