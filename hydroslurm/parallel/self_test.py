"""Does a library of sums that was just built add correctly on this processor?"""

from __future__ import annotations

from pathlib import Path

import torch

from hydroslurm.errors import GateSelfTestFailed
from hydroslurm.parallel.library import TYPES, Library


def self_test(path: str) -> None:
    """Add three of each type; for a process of its own, which may crash.

    Raises:
        GateSelfTestFailed: a sum is not PyTorch's.
    """
    library = Library(Path(path))
    for kind in TYPES:
        accumulate = torch.float64 if kind is torch.float64 else torch.float32
        sources = [torch.linspace(-3.0, 5.0, 1531).mul(n).to(kind) for n in (1, 3, 7)]
        found = torch.empty(1531, dtype=kind)
        library.sum(
            found.data_ptr(),
            kind,
            [source.data_ptr() for source in sources],
            kind,
            count=1531,
            accumulate=accumulate,
            scale=0.5,
        )
        wide = [source.to(accumulate) for source in sources]
        if not torch.equal(found, ((wide[0] + wide[1] + wide[2]) * 0.5).to(kind)):
            raise GateSelfTestFailed(f"a sum of three tensors of {kind} is not PyTorch's")
