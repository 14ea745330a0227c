"""The copies that a saver makes of the state, in memory that no save under way is reading."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from hydroslurm.checkpoint.contents import State
from hydroslurm.checkpoint.memory import Room
from hydroslurm.checkpoint.staging import NoMemory, Staging
from hydroslurm.checkpoint.write_plan import WritePlan


class Copies:
    """For the thread that trains."""

    def __init__(
        self,
        *,
        exempt: Callable[[], AbstractContextManager[None]],
        room: Callable[[], Room],
    ) -> None:
        """
        Args:
            exempt: makes the context in which no pause holds a thread.
            room: says how much memory may be taken.
        """
        self._exempt = exempt
        self._room = room
        self._staging = Staging(may_take=self._may_take)
        self._reserving: threading.Thread | None = None
        self._refused = ""
        self._others_bytes = 0

    def leave(self, others_bytes: int) -> None:
        """So much of what may be taken is for others."""
        self._others_bytes = others_bytes

    @property
    def state_bytes(self) -> int:
        """The size of the state that was copied last."""
        return self._staging.copied_bytes

    @property
    def refused(self) -> str:
        """Why there is no memory for copies, in words; empty where there is."""
        return self._refused

    def reserve(self, held: State | WritePlan) -> None:
        """Have the memory for copies of a state like this, in the background; once. Nothing where
        it would be too much."""
        # asked before the thread begins to take any: the ranks of a node come here together, and
        # one that finds the memory of another taken already would think that there is less
        if self._reserving is not None or not self._staging.may_hold(held):
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

    def copy(
        self, held: State | WritePlan, *, being_read: bool
    ) -> tuple[State | WritePlan, float] | None:
        """A copy, and how long it took, in seconds; None where there is no memory for one.

        Args:
            being_read: a save under way is reading the last one.
        """
        self.join()
        if self._refused:
            return None
        if being_read:
            self._staging = Staging(may_take=self._may_take)
        begin_s = time.monotonic()
        try:
            copied = self._staging.copy(held)
        except NoMemory:
            self._staging = Staging(may_take=self._may_take)  # what it holds is of no use
            return None
        return copied, time.monotonic() - begin_s

    def _may_take(self, more_bytes: int) -> bool:
        """Whether there is room. Once refused it stays so (see ``refused``): what was too much
        after a step may seem to fit in another moment, and end the job in the next."""
        room = self._room()
        if more_bytes <= room.free_bytes - self._others_bytes:
            return True
        others = f", {self._others_bytes / 1e6:,.0f} MB of them by the fast tier"
        self._refused = (
            f"a copy of the state in memory would take {more_bytes / 1e6:,.0f} MB more, and "
            f"{room.free_bytes / 1e6:,.0f} MB may be taken{others if self._others_bytes else ''} "
            f"({room.words})"
        )
        return False
