"""One parallel map over forked processes: for reading large event logs, and for the pictures."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from hydroslurm.errors import RunFolderError

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: tuple[Callable[[Any], Any], Sequence[Any]]
"""Of a worker process."""


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Apply ``function`` to each item in a process of its own; results come in order.

    All processes start at once, like those of ``Executor.map``; only taking a result waits. They
    are forked, so they share what is in memory and neither function nor items are pickled: a run is
    read once, however many processes look at it. Call this before other threads are started
    (importing numpy starts some).

    Raises:
        RunFolderError: when a result is taken whose process was killed.
    """
    if not items:
        return iter(())
    fork = multiprocessing.get_context("fork")
    # initargs are inherited, not pickled
    pool = ProcessPoolExecutor(len(items), fork, initializer=_begin, initargs=(function, items))
    futures = [pool.submit(_call, index) for index in range(len(items))]

    def results() -> Iterator[Result]:
        with pool:  # joins its thread, so that the next map may fork
            for future in futures:
                try:
                    yield future.result()
                except BrokenProcessPool as error:
                    raise RunFolderError(
                        "a process of the report was killed, perhaps for lack of memory. "
                        "Give the report more memory, or draw no pictures (--no-picture)"
                    ) from error

    return results()


def _begin(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _work
    _work = function, items


def _call(index: int) -> Any:
    function, items = _work
    return function(items[index])
