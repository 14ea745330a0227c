"""The position of a training in its data: an order that can be resumed, seeds, workers,
files of records."""

from __future__ import annotations

from hydroslurm.data.global_batches import GlobalBatchSampler
from hydroslurm.data.position import LoaderPosition, position_of
from hydroslurm.data.records import RecordDataset, RecordFile, RecordLoader, RecordWriter
from hydroslurm.data.sampler import ResumableSampler, SampleIndex
from hydroslurm.data.seeding import SeededDataset

__all__ = [
    "GlobalBatchSampler",
    "LoaderPosition",
    "RecordDataset",
    "RecordFile",
    "RecordLoader",
    "RecordWriter",
    "ResumableSampler",
    "SampleIndex",
    "SeededDataset",
    "position_of",
]
