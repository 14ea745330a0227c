"""The attempts of a training as forks of a process that has its framework loaded."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

STOPPED = 75
"""The exit status of an attempt that was stopped and is to be started again."""


def attempts(
    attempt: Callable[[str, Path, str], None],
    name: str,
    place: Path,
    stops: Sequence[str],
    *,
    world: int = 1,
    notes: str = "notes*",
) -> tuple[list[int], list[str]]:
    """Make attempts at a scene in this folder, each stopped as told, until one ends by itself.

    Args:
        world: how many ranks make each attempt, with torchrun's variables if there are several.
        notes: the files in the folder that they note lines in.

    Returns:
        The exit statuses of all ranks, one attempt after the other, and the lines of all notes.
    """
    place.mkdir(parents=True, exist_ok=True)
    exits: list[int] = []
    for number, stop in enumerate(stops):
        environ = torchrun(world, f"{place}-{number}") if world > 1 else [{}]

        def call(rank: int, stop: str = stop, environ: list[dict[str, str]] = environ) -> None:
            os.environ.update(environ[rank])
            attempt(name, place, stop)

        statuses = _forked(call, world)
        exits += statuses
        if not set(statuses) <= {STOPPED, -signal.SIGKILL}:
            break
    paths = sorted(place.glob(notes))
    return exits, [line for path in paths for line in path.read_text().splitlines()]


def torchrun(world: int, run_id: str) -> list[dict[str, str]]:
    """What torchrun sets for each rank of a node."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    return [
        {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
            "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id,
        }
        for rank in range(world)
    ]  # fmt: skip


def _forked(call: Callable[[int], Any], world: int) -> list[int]:
    """The exit statuses of children that do this, by rank."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                call(rank)
                status = 0
            except SystemExit as leaving:
                status = int(leaving.code or 0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                os._exit(status)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
