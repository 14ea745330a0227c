"""The attempts of a training as forks of a process that has its framework loaded."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STOPPED = 75
"""The exit status of an attempt that was stopped and is to be started again."""


def attempts(
    attempt: Callable[[str, Path, str], None], name: str, place: Path, stops: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Make attempts at a scene in this folder, each stopped as told, until one ends by itself.

    Returns:
        Their exit statuses, and the lines that they have noted.
    """
    place.mkdir(parents=True, exist_ok=True)
    exits: list[int] = []
    for stop in stops:
        exits.append(_forked(functools.partial(attempt, name, place, stop)))
        if exits[-1] not in (STOPPED, -signal.SIGKILL):
            break
    return exits, (place / "notes").read_text().splitlines()


def _forked(call: Any) -> int:
    """The exit status of a child that does this."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            call()
            status = 0
        except SystemExit as leaving:
            status = int(leaving.code or 0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
