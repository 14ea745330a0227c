"""The position of a training in its data: an order that can be resumed, seeds, workers."""

from __future__ import annotations

from hydroslurm.data.position import LoaderPosition, position_of
from hydroslurm.data.sampler import ResumableSampler, SampleIndex
from hydroslurm.data.seeding import SeededDataset
from hydroslurm.runtime.child_signals import shielded

__all__ = [
    "LoaderPosition",
    "ResumableSampler",
    "SampleIndex",
    "SeededDataset",
    "position_of",
    "shielded",
]
