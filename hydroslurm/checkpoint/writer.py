"""Tensors -> files of torch's distributed checkpoint (DCP), readable by any other DCP reader too.

Of DCP this uses the planner (who writes which piece of a DTensor), the metadata and the file
format: one ``torch.save`` per piece, one behind the other. Its own FileSystemWriter is not used:
it neither checksums, nor can be given up, and it computes a CRC of every tensor while it holds the
GIL, which would stall a training that goes on meanwhile.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hydroslurm.checkpoint.checksummed_file import CHUNK_BYTES, ChecksummedFile, write_whole
from hydroslurm.checkpoint.manifest import FileEntry
from hydroslurm.checkpoint.storage import Storage

METADATA = ".metadata"
"""DCP's own name for it."""


class PartsWriter(StorageWriter):
    """Writes this rank's tensors into one file of an existing folder, and DCP's metadata.

    ``files`` has the entries of what was written so far.
    """

    def __init__(
        self,
        folder: Path,
        *,
        storage: Storage,
        hasher: ThreadPoolExecutor,
        rank: int = 0,
        cancel: threading.Event | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self.files: dict[str, FileEntry] = {}
        self._folder = folder
        self._storage = storage
        self._hasher = hasher
        self._name = f"__{rank}_0.distcp"
        self._cancel = cancel
        self._chunk_bytes = chunk_bytes

    def reset(self, checkpoint_id: Any = None) -> None:
        """Part of DCP's protocol: a writer is made for one save here."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Part of DCP's protocol: asked only when DCP has to choose a writer by itself."""
        return isinstance(checkpoint_id, (str, Path))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Part of DCP's protocol: the folder is made by the store."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and fsync all items of a plan."""
        part = ChecksummedFile(
            self._folder / self._name,
            storage=self._storage,
            hasher=self._hasher,
            cancel=self._cancel,
            chunk_bytes=self._chunk_bytes,
        )
        try:
            with without_zip_crc():
                results = [self._write_item(part, item, planner) for item in plan.items]
            self.files[self._name] = part.finish()
        finally:
            part.abandon()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_item(
        self, part: ChecksummedFile, item: WriteItem, planner: SavePlanner
    ) -> WriteResult:
        data = planner.resolve_data(item)
        assert isinstance(data, torch.Tensor), f"{item.index.fqn} is no tensor"
        offset = part.tell()
        torch.save(compact(data), cast("IO[bytes]", part))
        part.check()
        length = part.tell() - offset
        return WriteResult(
            index=item.index,
            size_in_bytes=length,
            storage_data=_StorageInfo(self._name, offset, length),
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata; on the coordinator only."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {one.index: one.storage_data for many in results for one in many}
        self.files[METADATA] = write_whole(
            self._folder / METADATA,
            pickle.dumps(metadata),
            storage=self._storage,
            hasher=self._hasher,
        )


def write_tensors(tensors: Mapping[str, torch.Tensor], writer: PartsWriter) -> None:
    """Plan, write and fsync in one process. Not dcp.save: that warns when there is no process
    group, and looks for one by itself when there is."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    plan = planner.finish_plan(plans[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, in memory of its own size: torch.save writes the whole memory behind a view."""
    tensor = tensor.detach().cpu()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()


@contextlib.contextmanager
def without_zip_crc() -> Iterator[None]:
    """Spare torch's own CRC, which torch.load never checks.

    The setting is a thread's own in torch 2.13; in older ones a torch.save of another thread in the
    same moment goes without it too. Before 2.6 there is no setting.
    """
    try:
        from torch.serialization import get_crc32_options, set_crc32_options
    except ImportError:
        yield
        return
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
