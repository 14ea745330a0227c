"""Overlap the waiting of many small reads, where a file server makes them wait.

On a local disk a thread per read costs more than the read. On a shared one each call is a round
trip, and a thousand run folders are some ten thousand of them. Which of the two it is shows within
the first few items.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

THREADS = 64
"""More would take turns at the interpreter lock: a round trip is some fifty times a parse."""
TRIED = 4
SLOW_S = 0.002
"""Threads are started when so many items one after the other have waited so long each: not one of
them was in this machine's memory. Where the processor is busy, some wait too, but not all."""


def overlapped(
    function: Callable[[Item], Result], items: Sequence[Item], *, threads: int = THREADS
) -> Iterator[Result]:
    """Apply ``function`` to each item and yield the results in order; in threads from where on
    items have been seen to wait.

    ``function`` must not touch what another item's call touches. What it raises is raised here.
    """
    done = slow = 0
    while done < len(items) and slow < TRIED:
        begin_s = time.monotonic() - time.thread_time()
        result = function(items[done])
        waited_s = time.monotonic() - time.thread_time() - begin_s
        slow = slow + 1 if waited_s > SLOW_S else 0
        done += 1
        yield result
    if done == len(items):
        return
    with ThreadPoolExecutor(min(threads, len(items) - done)) as pool:
        yield from pool.map(function, items[done:])
