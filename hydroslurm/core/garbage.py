"""The collector of cycles, kept away from work that makes many objects and no cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Without the collector of cycles, which is woken by the number of new objects and walks over
    all that a process has. A save or a load makes ten objects for every tensor: walking takes
    longer than to copy 5,000 small tensors. A look at a thousand jobs makes a hundred thousand, and
    walking takes 10 to 30 % of it. Not for longer than Python works on these objects."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
