"""Whether the threads of the module hooks' gate sleep."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

from hydroslurm.core.proc import STATE, stat_of

_QUIET_NS = 20_000_000
"""Longer than the usual wait for the GIL (5 ms) or for an operator's other threads."""


class RestWatch:
    """Tells whether the main thread and all that run modules are quiet: they sleep, and have used
    no processor time for a while. A thread waiting for data or a device issues nothing.

    Attributes:
        exempted: native ids of threads that are neither held nor waited for.
    """

    def __init__(self) -> None:
        self.exempted: set[int] = set()
        self._native_ids: dict[int, int] = {}  # by Python's ident
        self._seen: dict[int, object] = {}
        self._since_ns = 0

    @contextlib.contextmanager
    def exempt(self) -> Iterator[None]:
        """Exempt the calling thread from being held, within the block."""
        added = {threading.get_native_id()} - self.exempted
        self.exempted |= added
        try:
            yield
        finally:
            self.exempted -= added

    def see(self) -> None:
        """Note that the calling thread runs modules."""
        ident = threading.get_ident()
        if ident not in self._native_ids:
            self._native_ids[ident] = threading.get_native_id()

    def quiet(self, *, but: Collection[int]) -> int | None:
        """Return the number of quiet threads if all are, besides ``but``, exempt threads and the
        caller; else None. A thread counts as quiet after two calls at least 20 ms apart."""
        for ident, tid in list(self._native_ids.items()):
            if not _task(tid).exists():  # the ident may return with another native id
                self._native_ids.pop(ident, None)
        known = {threading.main_thread().native_id or 0, *list(self._native_ids.values())}
        others = known - {*but, *self.exempted, threading.get_native_id()}
        now_ns = time.monotonic_ns()  # before the look: the caller may lose its processor in it
        seen = {tid: _run_of(tid) for tid in others}
        if seen != self._seen:
            self._seen, self._since_ns = seen, time.monotonic_ns()
        return len(seen) if not seen or now_ns - self._since_ns >= _QUIET_NS else None


def _task(tid: int) -> Path:
    return Path(f"/proc/self/task/{tid}")


def _run_of(tid: int) -> object:
    """Return a value: constant while the thread sleeps, new while it runs, None once gone."""
    try:
        sleeps = stat_of(f"self/task/{tid}")[STATE] in "SD"
        return (_task(tid) / "schedstat").read_text() if sleeps else object()
    except OSError:
        return None
