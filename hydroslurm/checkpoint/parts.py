"""What all ranks have written of one save, and the manifest that it makes. Pure, but for the sleeps
that let other threads work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from hydroslurm.checkpoint.manifest import OLDEST, SCHEMA, Manifest
from hydroslurm.checkpoint.save_round import checked
from hydroslurm.checkpoint.tensor_file import is_frozen_file
from hydroslurm.checkpoint.write_plan import TALLY_MODULUS
from hydroslurm.checkpoint.writer import Part
from hydroslurm.errors import SaveFailed

AT_A_TIME, LET_GO_S = 32, 1e-4
"""Answers that are read before the training may have the interpreter. It asks for it 5 ms after it
has come to need it, and of 512 ranks that would be all the time that reading takes."""


@dataclass(frozen=True)
class Parts:
    """All parts of a save, which are on the disk now.

    Attributes:
        answers: rank -> what it has written, unchecked. All of them only on the ranks that may
            have to commit.
        whole_tally: of all values of the tensors that the ranks share.
    """

    answers: Mapping[int, Any]
    whole_tally: int

    def described(self, header: Manifest, *, save_s: float | None = None) -> Manifest:
        """The manifest of a save that has these parts.

        Args:
            save_s: None: how long the slowest rank took.

        Raises:
            SaveFailed: an answer is none, or the pieces of the shared tensors do not make up the
                whole.
        """
        parts, took_s = [], []
        for number, (rank, one) in enumerate(sorted(self.answers.items()), start=1):
            parts.append(Part.from_answer(one, rank=rank, world_size=header.world_size))
            took_s.append(checked(one, rank=rank, took_s=(int, float))["took_s"])
            if number % AT_A_TIME == 0:
                time.sleep(LET_GO_S)
        if sum(part.tally for part in parts) % TALLY_MODULUS != self.whole_tally:
            raise SaveFailed(
                f"the pieces that {len(parts)} ranks have written do not make up the "
                "tensors that they share: they do not hold the same ones. Is every DTensor laid "
                "out over one mesh of all ranks?"
            )
        files = {name: entry for part in parts for name, entry in part.files.items()}
        return replace(
            header,
            schema=SCHEMA if any(map(is_frozen_file, files)) else OLDEST,
            files=files,
            save_s=max(took_s) if save_s is None else save_s,
            state_bytes=sum(part.state_bytes for part in parts),
        )
