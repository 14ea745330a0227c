"""The copies that a saver makes of the state, in memory that no save under way is reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from hydroslurm.checkpoint.contents import State
from hydroslurm.checkpoint.portion import Portion
from hydroslurm.checkpoint.staging import Staging


class Copies:
    """For the thread that trains."""

    def __init__(self, *, exempt: Callable[[], AbstractContextManager[None]]) -> None:
        """``exempt``: makes the context in which no pause holds a thread."""
        self._exempt = exempt
        self._staging = Staging()
        self._reserving: threading.Thread | None = None

    @property
    def state_bytes(self) -> int:
        """The size of the state that was copied last."""
        return self._staging.copied_bytes

    def reserve(self, held: State | Portion) -> None:
        """Have the memory for copies of a state like this, in the background; once."""
        if self._reserving is not None:
            return

        def reserve() -> None:
            with self._exempt():
                self._staging.reserve(held)

        self._reserving = threading.Thread(target=reserve, name="hydroslurm-reserve", daemon=False)
        self._reserving.start()

    def join(self) -> None:
        """Wait until the memory is there."""
        if self._reserving is not None:
            self._reserving.join()

    def copy(self, held: State | Portion, *, being_read: bool) -> tuple[State | Portion, float]:
        """A copy, and how long it took, in seconds.

        Args:
            being_read: a save under way is reading the last one.
        """
        self.join()
        if being_read:
            self._staging = Staging()
        begin_s = time.monotonic()
        copied = self._staging.copy(held)
        return copied, time.monotonic() - begin_s
