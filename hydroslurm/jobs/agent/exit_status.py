"""How a node's workers ended -> what the agent does, and its exit status. Pure."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Collection, Iterable
from enum import Enum
from pathlib import Path

from hydroslurm.core.exitcodes import CANCELLED, MUST_NOT_RUN_AGAIN, RUN_AGAIN

ON_PURPOSE = (MUST_NOT_RUN_AGAIN, CANCELLED, RUN_AGAIN)
"""The most binding first: a cancelled job must not be requeued because one of its ranks would have
it so."""
_KILLED_BY_TERM = -int(signal.SIGTERM)


class Decision(Enum):
    """What to do about the workers of a node, of which one has ended."""

    GO_ON = "go_on"
    """Nobody failed."""
    WAIT = "wait"
    """Some have left on purpose and the others are on their way: leave them alone."""
    END_OTHERS = "end_others"
    """A worker failed: the others cannot go on without it."""
    LEAVE = "leave"
    """All have ended, and none is to be started again."""


def decide(codes: Iterable[int | None], *, stop_asked: bool, others_leave: bool) -> Decision:
    """Judge the workers of one node.

    Args:
        codes: exit status of each as Python gives it, negative for a signal; None: it lives.
        stop_asked: this agent was told to stop.
        others_leave: those that live are seen to be stopping, or may still be about to.
    """
    all_codes = list(codes)
    ended = [code for code in all_codes if code is not None]
    living = len(ended) < len(all_codes)
    left = any(_on_purpose(code, stop_asked=stop_asked) for code in ended)
    failed = any(code and not _on_purpose(code, stop_asked=stop_asked) for code in ended)
    if living:
        if stop_asked or (left and others_leave):
            return Decision.WAIT if left or failed else Decision.GO_ON
        return Decision.END_OTHERS if left or failed else Decision.GO_ON
    return Decision.LEAVE if left or (failed and stop_asked) else Decision.GO_ON


def node_status(codes: Iterable[int], *, stop_asked: bool) -> int | None:
    """The one status of a node whose workers have all ended; None when that is for torchrun to
    say.

    What was saved is saved although another worker crashed on its way out. A worker that SIGTERM
    killed had not come so far that it could save: it counts as ended by a stop only when no other
    says more.
    """
    ended = set(codes)
    for code in ON_PURPOSE:
        if code in ended:
            return code
    if stop_asked and _KILLED_BY_TERM in ended and not any(code > 0 for code in ended):
        return CANCELLED
    return None


def failure_status(codes: Collection[int], *, stop_asked: bool) -> int | None:
    """The status of a node whose first workers to fail were these, at the same moment as far as
    anybody can tell; None where none has failed.

    Torchrun always says 1. 128 + N stands for a signal, as in a shell, so that a restart policy can
    tell a killed worker from one that crashed. The greatest, for 1 is how Python leaves of any
    exception, the one about a peer that was killed included.
    """
    failed = [code for code in codes if code and not _on_purpose(code, stop_asked=stop_asked)]
    return max((128 - code if code < 0 else code for code in failed), default=None)


def _on_purpose(code: int, *, stop_asked: bool) -> bool:
    return code in ON_PURPOSE or (stop_asked and code == _KILLED_BY_TERM)


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
