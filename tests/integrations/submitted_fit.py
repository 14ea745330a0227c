"""What people submit with submitit; knows nothing of hydroslurm."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any


def fit(script: Path, folder: Path, arguments: list[str], unpickled: Any = None) -> list[str]:
    """Train by a script with Lightning.

    Args:
        unpickled: of torch's; the process then imports torch before submitit installs its handlers
            for signals. Else it does so here, after that.
    """
    del unpickled
    os.chdir(folder)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    return sorted(str(one) for one in Path("logs").rglob("*"))
