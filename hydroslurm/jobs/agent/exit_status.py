"""From how a node's workers ended to what the agent does and its exit status. Pure."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Collection, Iterable
from pathlib import Path

from hydroslurm.core.exitcodes import CANCELLED, MUST_NOT_RUN_AGAIN, RUN_AGAIN

ON_PURPOSE = (MUST_NOT_RUN_AGAIN, CANCELLED, RUN_AGAIN)
"""The most binding first: a cancelled job must not be requeued because one of its ranks wants
it."""
_KILLED_BY_TERM = -int(signal.SIGTERM)


def are_leaving(codes: Iterable[int | None], *, stop_asked: bool, others_leave: bool) -> bool:
    """Whether workers of a node live that leave by themselves, and are waited for: not those that
    cannot go on without one that has failed.

    Args:
        codes: exit code of each as Python reports it, negative for a signal; None: it lives.
        stop_asked: this agent was asked to stop.
        others_leave: those that live are known to be stopping, or may still be about to.
    """
    all_codes = list(codes)
    if None not in all_codes:
        return False
    ended = [code for code in all_codes if code]
    if stop_asked:
        return bool(ended)
    return others_leave and any(_on_purpose(code, stop_asked=False) for code in ended)


def node_status(codes: Iterable[int], *, stop_asked: bool) -> int | None:
    """The status of a node whose workers have all ended; None leaves it to torchrun.

    What was saved stays saved even if another worker crashed while exiting. A worker that SIGTERM
    killed was not ready to save: it counts as ended by a stop only if no other says more.
    """
    ended = set(codes)
    for code in ON_PURPOSE:
        if code in ended:
            return code
    if stop_asked and _KILLED_BY_TERM in ended and not any(code > 0 for code in ended):
        return CANCELLED
    return None


def failure_status(codes: Collection[int], *, stop_asked: bool) -> int | None:
    """The status of a node whose first workers to fail, at once as far as we can tell, had these
    exit codes; None if none has failed.

    Torchrun always exits with 1. Here 128 + N stands for a signal, as in a shell, so that a restart
    policy can tell a killed worker from one that crashed. The greatest code wins: Python exits with
    1 after any exception, also one about a peer that was killed.
    """
    failed = [code for code in codes if code and not _on_purpose(code, stop_asked=stop_asked)]
    return max((128 - code if code < 0 else code for code in failed), default=None)


def _on_purpose(code: int, *, stop_asked: bool) -> bool:
    return code in ON_PURPOSE or (stop_asked and code == _KILLED_BY_TERM)


def what_is_missing(script: str, *, is_program: bool, is_module: bool) -> tuple[int, str] | None:
    """The status of a node without its script or program, as if srun had started it directly, and
    one line about it: 2 (as Python) for a missing script, 127 for a missing program, 126 for one
    that cannot be run. None if it is there.

    A module is not looked for: that would import its parents.

    Args:
        script: torchrun's ``training_script``.
        is_program: started as it is (``--no-python``); without a slash, from the PATH.
        is_module: ``-m``.
    """
    host, path = socket.gethostname(), Path(script)
    if is_module or (shutil.which(script) is not None if is_program else path.exists()):
        return None
    if is_program:
        place = path.absolute() if os.sep in script else f"{script!r} on the PATH"
        return 126 if os.sep in script and path.exists() else 127, (
            f"there is no program {place} that can be run on {host}; give a path that all nodes "
            "see, chmod +x it, or omit --no-python for a Python script"
        )
    return 2, (
        f"there is no script {path.absolute()} on {host}; give a path that all nodes see, or start "
        "in its folder (srun --chdir). torchrun's options go before the script, its own after it"
    )
