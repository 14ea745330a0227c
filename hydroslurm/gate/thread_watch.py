"""Which threads run modules, and whether those that are not held have gone quiet.

A thread that waits for data, in a collective or for a device reaches no hook, yet it issues
nothing. It is quiet when the kernel says that it sleeps and it has had no processor time for a
while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from pathlib import Path

QUIET_NS = 20_000_000
"""How long a thread must have slept to be quiet. Longer than a wait for the GIL (5 ms), or for the
other threads of a parallel operator, usually takes."""

_TASKS = Path("/proc/self/task")


class ThreadWatch:
    """The threads that were seen, and since when each has been asleep. :meth:`see` takes no
    lock."""

    def __init__(self) -> None:
        self._native_ids: dict[int, int] = {}  # by Python's thread ident
        self._asleep: dict[int, tuple[str, int]] = {}  # native id -> (processor time, since)

    def see(self) -> None:
        """The calling thread runs modules."""
        ident = threading.get_ident()
        if ident not in self._native_ids:
            self._native_ids[ident] = threading.get_native_id()

    def begin(self) -> None:
        """Forget who was asleep: a new pause has begun."""
        self._asleep = {}

    def quiet(self, *, excluding: Collection[int]) -> int | None:
        """How many threads are quiet, when all but the excluded ones are; None while one is busy.

        The main thread counts always. ``excluding`` holds native ids. Needs at least two calls in
        one pause, :data:`QUIET_NS` apart, before a thread is quiet.
        """
        main = threading.main_thread()
        known = {main.native_id or 0, *list(self._native_ids.values())}
        quiet = [self._is_quiet(native_id) for native_id in known - set(excluding)]
        return len(quiet) if all(quiet) else None

    def _is_quiet(self, native_id: int) -> bool:
        now_ns = time.monotonic_ns()
        try:
            state = (_TASKS / f"{native_id}/stat").read_text().rpartition(") ")[2][0]
            used = (_TASKS / f"{native_id}/schedstat").read_text().split()[0]
        except (OSError, IndexError):
            self._forget(native_id)
            return True
        if state not in "SD" or self._asleep.get(native_id, ("", 0))[0] != used:
            self._asleep[native_id] = (used, now_ns)
            return False
        return now_ns - self._asleep[native_id][1] >= QUIET_NS

    def _forget(self, native_id: int) -> None:
        """A thread that has ended; its ident may come back with another native id."""
        for ident, known in list(self._native_ids.items()):
            if known == native_id:
                self._native_ids.pop(ident, None)
