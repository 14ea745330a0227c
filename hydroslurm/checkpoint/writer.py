"""What one rank writes of a state.

part-00000.safetensors  that rank's tensors and pieces of tensors
part-00000.json         the index of that file, and what only that rank has
frozen-00000.safetensors, frozen-00000.json
                        the same of that rank's tensors that are frozen, if there are any
shared.json             what all ranks share, tensors as references; rank 0 writes it

Nothing is written that is about the parts of all ranks: a commit takes the same time for one rank
and for thousands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from hydroslurm.checkpoint.checksummed_file import ChecksummedFile, FileEntry, write_whole
from hydroslurm.checkpoint.frozen import FrozenFiles
from hydroslurm.checkpoint.host_memory import packed
from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.peers import parsed
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.tensor_file import (
    SHARED_JSON,
    files_of_part,
    frozen_part,
    index_text,
)
from hydroslurm.checkpoint.write_plan import TALLY_MODULUS, WritePlan
from hydroslurm.core.decoding import Count, Seconds
from hydroslurm.core.garbage import without_gc
from hydroslurm.errors import SaveFailed


@dataclass(frozen=True)
class Part:
    """What one rank has written, as the rank that commits needs it.

    Attributes:
        files: name -> entry.
        tally: of the values in its pieces of what the ranks share (``write_plan.tally_of``).
        state_bytes: of its tensors that it has written, as they are in memory.
        took_s: since the save began.
    """

    files: dict[str, FileEntry]
    tally: Count
    state_bytes: Count
    took_s: Seconds = 0.0

    @classmethod
    def from_answer(cls, answer: Any, *, rank: int) -> Part:
        """Of another rank; SaveFailed if it names other files than such a rank writes."""
        part = parsed(cls, answer, rank=rank)
        expected = {*files_of_part(rank), *([] if rank else [SHARED_JSON])}
        if set(part.files) not in (expected, expected.union(files_of_part(frozen_part(rank)))):
            raise SaveFailed(
                f"rank {rank} says that it has written {sorted(part.files)!r:.200}; expected "
                f"{sorted(expected)}"
            )
        return part


def manifest_of(answers: Mapping[int, Any], header: Manifest, *, whole_tally: int) -> Manifest:
    """The manifest of a save whose parts are all on the disk.

    Args:
        answers: rank -> what it has written, unchecked.
        whole_tally: of all values of the tensors that the ranks share.

    Raises:
        SaveFailed: an answer is none, or the pieces of the shared tensors do not make up the whole.
    """
    parts = [Part.from_answer(one, rank=rank) for rank, one in sorted(answers.items())]
    if sum(part.tally for part in parts) % TALLY_MODULUS != whole_tally:
        raise SaveFailed(
            f"the pieces that {len(parts)} ranks have written do not make up the "
            "tensors that they share: they do not hold the same ones. Is every DTensor laid "
            "out over one mesh of all ranks?"
        )
    files = {name: entry for part in parts for name, entry in part.files.items()}
    return replace(
        header,
        files=files,
        save_s=max(part.took_s for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
    )


def write_part(
    folder: Path,
    plan: WritePlan,
    *,
    storage: Storage,
    stored: FrozenFiles,
    cancel: Event | None = None,
) -> Part:
    """Write and fsync what is this rank's into an existing folder.

    Args:
        stored: has what need not be written again.

    Raises:
        OSError: a call failed. SaveAbandoned: ``cancel`` was set. CheckpointCorrupt: what is stored
            is not what was written.
    """
    parts = list[Part]()
    numbers = [plan.rank]
    if plan.frozen_pieces:
        linked = stored.put(folder, plan, cancel=cancel)
        parts.append(Part(linked, 0, 0))
        numbers = [plan.rank] if linked else [frozen_part(plan.rank), plan.rank]
    for number in numbers:
        is_own = number == plan.rank
        with without_gc():
            laid = plan.laid if is_own else plan.laid_frozen
        tensors = plan.tensors if is_own else plan.frozen
        assert tensors is not None, "nothing that is stored is copied"
        index_name, name = files_of_part(number)
        with ChecksummedFile(folder / name, storage=storage, cancel=cancel) as file:
            file.write(laid.header)
            for data in packed(tensors[place] for place in laid.order):
                file.write(data)
            # while the disk takes the tensors
            with without_gc():
                texts = {
                    index_name: index_text(
                        laid,
                        rank=number,
                        own=plan.own if is_own else {},
                        blocks=file.blocks,
                        fingerprint="" if is_own else plan.fingerprint,
                    )
                }
                if number == 0:
                    texts[SHARED_JSON] = shared_text(plan)
                tally = plan.tally if is_own else 0
            files = {name: file.finish()}
        for text_name, text in texts.items():
            files[text_name] = write_whole(folder / text_name, text, storage=storage)
        parts.append(Part(files, tally, files[name].size_bytes - len(laid.header)))
    return Part(
        {name: entry for part in parts for name, entry in part.files.items()},
        tally=sum(part.tally for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
    )


def shared_text(plan: WritePlan) -> tuple[bytes, ...]:
    """What all ranks share, in pieces: the state, and its tensors, by key: shape, dtype, and the
    rank that has written it, or null for one that is in pieces."""
    state = json.dumps(plan.shared, allow_nan=False, separators=(",", ":"))
    tensors = json.dumps(plan.shared_tensors, separators=(",", ":"))
    return b'{"state":', state.encode(), b',"tensors":', tensors.encode(), b"}"
