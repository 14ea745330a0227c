"""What one rank writes of a state.

part-00000.safetensors  that rank's tensors and pieces of tensors
part-00000.json         the index of that file, and what only that rank has
shared.json             what all ranks share, tensors as references; rank 0 writes it

Of more than 256 ranks the first two are in folders, such as 001/part-00300.json.

Nothing is written that is about the parts of all ranks: a commit takes the same time for one rank
and for thousands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from hydroslurm.checkpoint.checksummed_file import CHUNK_BYTES, ChecksummedFile, write_whole
from hydroslurm.checkpoint.manifest import FileEntry, file_entries
from hydroslurm.checkpoint.save_round import checked
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tensor_bytes import GATHER_BYTES, packed
from hydroslurm.checkpoint.tensor_file import index_name, index_text, part_name, tensors_name
from hydroslurm.checkpoint.write_plan import WritePlan
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import SaveFailed

SHARED_JSON = "shared.json"


@dataclass(frozen=True)
class Part:
    """What one rank has written, as the rank that commits needs it.

    Attributes:
        files: name -> entry.
        tally: of the values in its pieces of what the ranks share (``write_plan.tally_of``).
        state_bytes: of its tensors, as they are in memory.
    """

    files: Mapping[str, FileEntry]
    tally: int
    state_bytes: int

    def to_answer(self) -> dict[str, Any]:
        """For the other ranks."""
        files = {name: [entry.size_bytes, entry.checksum] for name, entry in self.files.items()}
        return {"files": files, "tally": self.tally, "state_bytes": self.state_bytes}

    @classmethod
    def from_answer(cls, answer: Any, *, rank: int, world_size: int) -> Part:
        """Of another rank; SaveFailed if it names other files than such a rank writes."""
        told = checked(answer, rank=rank, files=dict, tally=int, state_bytes=int)
        try:
            files = file_entries(
                {
                    name: {"size_bytes": size_bytes, "checksum": checksum}
                    for name, (size_bytes, checksum) in told["files"].items()
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise SaveFailed(f"rank {rank} names no files that it has written: {error}") from error
        expected = names_of(rank, world_size)
        if set(files) != expected:
            raise SaveFailed(
                f"rank {rank} says that it has written {sorted(files)!r:.200}; expected "
                f"{sorted(expected)}"
            )
        return cls(files, told["tally"], told["state_bytes"])


def names_of(rank: int, world_size: int) -> set[str]:
    """The files that a rank writes."""
    part = part_name(rank, world_size)
    shared = {SHARED_JSON} if rank == 0 else set()
    return {index_name(part), tensors_name(part)} | shared


def write_part(
    folder: Path,
    plan: WritePlan,
    *,
    storage: Storage,
    cancel: Event | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Part:
    """Write and fsync what is this rank's into an existing folder, in which the inner one for this
    rank exists.

    Raises:
        OSError: a call failed. SaveAbandoned: ``cancel`` was set.
    """
    files: dict[str, FileEntry] = {}
    layout = plan.layout
    with without_gc():
        laid = layout.laid
    part = part_name(layout.rank, layout.world_size)
    name = tensors_name(part)
    file = ChecksummedFile(folder / name, storage=storage, cancel=cancel, chunk_bytes=chunk_bytes)
    try:
        file.write(laid.header)
        tensors = (plan.tensors[number] for number in laid.order)
        for data in packed(tensors, gather_bytes=min(GATHER_BYTES, chunk_bytes)):
            file.write(data)
        # while the disk takes the tensors
        with without_gc():
            texts = {
                index_name(part): index_text(
                    laid, rank=layout.rank, own=plan.own, blocks=file.blocks
                )
            }
            if layout.rank == 0:
                texts[SHARED_JSON] = shared_text(plan)
            tally = layout.tally
        files[name] = file.finish()
    finally:
        file.abandon()
    for text_name, text in texts.items():
        files[text_name] = write_whole(folder / text_name, *text, storage=storage)
    return Part(files, tally, files[name].size_bytes - len(laid.header))


def shared_text(plan: WritePlan) -> tuple[bytes, ...]:
    """What all ranks share, in pieces: the state, and its tensors, by key: shape, dtype, and the
    rank that has written it, or null for one that is in pieces."""
    state = json.dumps(plan.shared, allow_nan=False, separators=(",", ":"))
    return b'{"state":', state.encode(), b',"tensors":', plan.layout.shared_tensors, b"}"
