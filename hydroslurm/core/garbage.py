"""Pausing Python's cycle collector during work that makes many objects and no cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause the cycle collector, which the number of new objects triggers, and which walks over
    every object of the process. A save or a load makes ten objects per tensor: with 5,000 small
    tensors walking takes longer than copying. Listing a thousand jobs makes a hundred thousand, and
    walking takes 10 to 30 % of the time. Use it around pure Python work only."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
