"""Pausing Python's cycle collector, which the number of new objects triggers, and which walks over
every object of the process.

Several threads may want that at the same time: it comes back when the last of them is done, if it
was on when the first began.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.RLock()
_holders, _was_enabled = 0, False


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause the collector. A save or a load makes ten objects per tensor: with 5,000 small tensors
    walking takes longer than copying. Listing a thousand jobs makes a hundred thousand, and walking
    takes 10 to 30 % of the time. Use it around pure Python work only."""
    stop_collector()
    try:
        yield
    finally:
        let_collect()


def stop_collector() -> None:
    """Pause the collector until :func:`let_collect` is called as often as this."""
    global _holders, _was_enabled
    with _lock:
        if _holders == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _holders += 1


def let_collect() -> None:
    """End one pause of the collector."""
    global _holders
    with _lock:
        _holders -= 1
        if _holders == 0 and _was_enabled:
            gc.enable()


def _after_fork() -> None:
    """The threads that paused it are not in the child."""
    global _lock, _holders
    _lock = threading.RLock()
    if _holders and _was_enabled:
        gc.enable()
    _holders = 0


os.register_at_fork(after_in_child=_after_fork)
