"""The position of a training in its data: an order that can be resumed, seeds, workers,
files of records."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydroslurm.data.global_batches import GlobalBatchSampler as GlobalBatchSampler
    from hydroslurm.data.position import LoaderPosition as LoaderPosition
    from hydroslurm.data.position import position_of as position_of
    from hydroslurm.data.records import RecordDataset as RecordDataset
    from hydroslurm.data.records import RecordFile as RecordFile
    from hydroslurm.data.records import RecordLoader as RecordLoader
    from hydroslurm.data.records import RecordWriter as RecordWriter
    from hydroslurm.data.sampler import ResumableSampler as ResumableSampler
    from hydroslurm.data.sampler import SampleIndex as SampleIndex
    from hydroslurm.data.seeding import SeededDataset as SeededDataset

_HOME = {
    "GlobalBatchSampler": "global_batches",
    "LoaderPosition": "position",
    "RecordDataset": "records",
    "RecordFile": "records",
    "RecordLoader": "records",
    "RecordWriter": "records",
    "ResumableSampler": "sampler",
    "SampleIndex": "sampler",
    "SeededDataset": "seeding",
    "position_of": "position",
}
"""Name -> the module that has it."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hydroslurm.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hydroslurm.data.{_HOME[name]}"), name)
