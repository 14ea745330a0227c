"""Whether there is what the workers are to run, before any of them is started."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path


def missing_status(script: str, *, is_program: bool) -> int:
    """The status of a node without it, which is what the command leaves with where srun starts it:
    2, Python's own, without its script; 127 without the program, 126 where that cannot be run."""
    if not is_program:
        return 2
    return 126 if os.sep in script and Path(script).exists() else 127


def what_is_missing(script: str, *, is_program: bool, is_module: bool) -> str | None:
    """One line about a script that is not there; None where it is.

    A module is Python's to find: looking for it would import its parents.

    Args:
        script: torchrun's ``training_script``.
        is_program: started as it is (``--no-python``), from the PATH where it has no slash.
        is_module: ``-m``.
    """
    if is_module:
        return None
    host = socket.gethostname()
    if is_program:
        if shutil.which(script) is not None:
            return None
        place = Path(script).absolute() if os.sep in script else f"{script!r} on the PATH"
        return (
            f"there is no program {place} that can be run on {host}; give a path that all nodes "
            "see, chmod +x it, or leave --no-python out for a Python script"
        )
    path = Path(script)
    if path.exists():
        return None
    return (
        f"there is no script {path.absolute()} on {host}; give a path that all nodes see, or start "
        "in its folder (srun --chdir). Options of torchrun's go before the script, those of the "
        "script behind it"
    )
