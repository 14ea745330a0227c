"""Do something in a second process while this one goes on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NoReturn

from hydroslurm.errors import RunFolderError


class Aside:
    """A forked child. It has everything that is in memory, so that a run is read once. Fork before
    threads are started: numpy starts some when it is imported."""

    def __init__(self, work: Callable[[], bytes]) -> None:
        self._answer, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._answer)
            _child(work, answer)
        os.close(answer)

    def answer(self) -> bytes:
        """Wait until it is done, and take what it has made.

        Raises:
            RunFolderError: it failed; in its words.
        """
        with os.fdopen(self._answer, "rb") as file:
            said = file.read()
        _, status = os.waitpid(self._pid, 0)
        if status != 0:
            words = said.decode(errors="replace")
            raise RunFolderError(words or f"a part of the report ended with status {status}")
        return said


def _child(work: Callable[[], bytes], answer: int) -> NoReturn:
    status = 1
    try:
        made, status = work(), 0
    except BaseException as error:  # everything is told, nothing is raised into the parent's stack
        made = (str(error) or type(error).__name__).encode(errors="replace")
    with contextlib.suppress(OSError), os.fdopen(answer, "wb") as file:
        file.write(made)
    os._exit(status)
