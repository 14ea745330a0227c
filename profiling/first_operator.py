"""The job that startup.py submits: `first_operator.py FILE` writes when its first operator was done
(CLOCK_MONOTONIC, ns)."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch


def main() -> None:
    torch.ones(2).sum()
    done_ns = time.monotonic_ns()
    file = Path(sys.argv[1])
    part = file.with_suffix(".part")
    part.write_text(f"{done_ns}\n")
    part.replace(file)  # who waits for it sees it whole


if __name__ == "__main__":
    main()
