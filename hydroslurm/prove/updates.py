"""The record of one optimizer step, kept in files of one JSON line each.

The recorder in the script writes them, the comparison reads them; neither knows the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

PROVE_ENV = "HYDROSLURM_PROVE"
"""Environment variable: the folder to write to; without it nothing is recorded."""

RESTART = "%r"
"""Number of the attempt in that folder's name, by Slurm's count of restarts."""
LIMIT_FILE = "limit"
"""File in that folder: how many updates a process may make before it waits for a higher number;
missing or empty: any number."""

_CHUNK_BYTES = 1 << 20
_NAME = re.compile(r"rank(\d+)\.pid\d+\.jsonl")


class Update(msgspec.Struct, frozen=True):
    """One call of an optimizer's ``step``. Tensors are represented by a CRC of their bytes.

    Attributes:
        optimizer: its index, in the order of first steps.
        weights: name of each parameter of that optimizer -> its value before the step.
        after: the same after it.
        buffers: those of the trained modules, before the step.
        state: name of a parameter and of its entry in the optimizer -> value before the step.
        lr: learning rate of each group.
        rng: generator -> its state before the first forward of this step.
        rows: for each forward, one CRC per sample.
        samples: the same as indices into the dataset; None for rows not from a DataLoader.
        losses: tensors that ``backward`` was called on.
        iterator: index of the first sample's DataLoader iterator, in the order of their first
            batches; None if from none.
    """

    optimizer: int
    weights: Mapping[str, str]
    after: Mapping[str, str]
    buffers: Mapping[str, str]
    state: Mapping[str, str]
    lr: tuple[str, ...]
    rng: Mapping[str, str]
    rows: tuple[tuple[str, ...], ...]
    samples: tuple[tuple[int | None, ...], ...]
    losses: tuple[str, ...]
    iterator: int | None = None


_decoder = msgspec.json.Decoder(Update)


def file_of(environ: Mapping[str, str]) -> Path:
    """Return the file of this process; PROVE_ENV is set."""
    rank = environ.get("RANK") or environ.get("SLURM_PROCID") or "0"
    attempt = int(environ.get("SLURM_RESTART_COUNT") or 0) + 1
    folder = environ[PROVE_ENV].replace(RESTART, str(attempt))
    return Path(folder) / f"rank{int(rank)}.pid{os.getpid()}.jsonl"


class Counter:
    """Counts a folder's updates while they are written; reads only what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[Path, tuple[int, int]] = {}

    def count(self) -> int:
        """Return how many updates every rank has written, of those that wrote any."""
        for path in self._folder.glob("rank*.jsonl"):
            offset, lines = self._seen.get(path, (0, 0))
            with path.open("rb") as file:
                file.seek(offset)
                while data := file.read(_CHUNK_BYTES):
                    offset, lines = offset + len(data), lines + data.count(b"\n")
            self._seen[path] = offset, lines
        return min((lines for _, lines in self._seen.values()), default=0)


def read(folder: Path) -> dict[int, list[Update]]:
    """Return all updates of one attempt: rank -> its updates.

    Of several processes with one rank the one with most updates counts. Lines cut short by a kill
    are skipped.
    """
    updates_of: dict[int, list[Update]] = {}
    for path in folder.glob("rank*.jsonl"):
        if (match := _NAME.fullmatch(path.name)) is not None:
            whole, _, _ = path.read_bytes().rpartition(b"\n")
            updates = _decoder.decode_lines(whole)
            updates_of[int(match[1])] = max(updates_of.get(int(match[1]), []), updates, key=len)
    return dict(sorted(updates_of.items()))
