"""Read a run folder into a :class:`~hydroslurm.report.history.History`, large ones in parallel."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hydroslurm.core.events import Event
from hydroslurm.core.files import clean
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import RunFolderError
from hydroslurm.report.attempts import Attempt, attempts_of
from hydroslurm.report.clocks import align
from hydroslurm.report.history import History
from hydroslurm.report.lines import Unread, rank_events

_MOST_RANKS = 100_000
"""Larger numbers are damage."""
_PARALLEL_BYTES = 16 * 2**20
"""For less, forking and returning results cost more than they save."""


def read_history(folder: Path) -> History:
    """Read all event files of a run folder; skip torn and foreign lines.

    Raises:
        RunFolderError: the folder is missing, is not a run folder or cannot be read.
    """
    run_dir = RunDir(folder)
    try:
        _check(run_dir)
        files = list(run_dir.rank_event_files().values())
        parts = _read_all(files)
        failed = [error for part in parts for error in part.failed]
        if failed and len(failed) == len(files):
            raise failed[0]
    except OSError as error:
        raise RunFolderError(
            f"cannot read {error.filename}: {error.strerror}. "
            "A run folder is its owner's (0700): run this as that user"
        ) from error
    attempts = sorted(
        (attempt for part in parts for attempt in part.attempts), key=lambda attempt: attempt.rank
    )
    aligned, alignment = align(attempts)
    sentences = sorted((s for part in parts for s in part.sentences), key=lambda pair: pair[0])
    return History(
        clean(folder.resolve().name),
        aligned,
        events=sum(part.events for part in parts),
        missing=(
            *(sentence for _, sentence in sentences),
            *_ranks_missing(aligned),
            *_lost_signals(aligned),
        ),
        alignment=alignment,
    )


def _read_all(files: Sequence[Path]) -> list[_Part]:
    """Read large logs in one process per CPU: a million lines take one half a minute, and ranks'
    files may be read in any order."""
    sizes = {path: path.lstat().st_size for path in files}
    count = min(len(os.sched_getaffinity(0)), len(files))
    if count < 2 or sum(sizes.values()) < _PARALLEL_BYTES:
        return [_read(files)]
    by_size = sorted(files, key=lambda path: sizes[path], reverse=True)
    shares = [by_size[first::count] for first in range(count)]
    others = parallel_map(_read, shares[1:])
    return [_read(shares[0]), *others]  # one share here, whose result needs no transfer


@dataclass(frozen=True)
class _Part:
    """Contents of some files; sentences with their ranks; and why some files are unreadable."""

    attempts: tuple[Attempt, ...]
    events: int
    sentences: tuple[tuple[int, str], ...]
    failed: tuple[OSError, ...]


def _read(files: Sequence[Path]) -> _Part:
    events = 0
    sentences: list[tuple[int, str]] = []
    failed: list[OSError] = []

    def all_events() -> Iterator[Event]:
        nonlocal events
        for path in files:
            rank, unread = int(path.stem.rpartition("-")[2]), Unread()
            try:
                for event in rank_events(path, unread):
                    events += 1
                    yield event
            except OSError as error:
                failed.append(OSError(error.errno, error.strerror, str(path)))
                sentences.append((rank, f"Rank {rank}: {path} cannot be read: {error.strerror}."))
            sentences.extend((rank, f"Rank {rank}: {words}.") for words in unread.words())

    attempts = attempts_of(all_events())
    return _Part(attempts, events, tuple(sentences), tuple(failed))


def _ranks_missing(attempts: Iterable[Attempt]) -> Iterator[str]:
    """Name ranks that others joined, but that wrote nothing."""
    seen, wanted = set(), 0
    for attempt in attempts:
        seen.add(attempt.rank)
        wanted = max(wanted, attempt.world_size)
    absent = sorted(set(range(wanted)) - seen) if wanted <= _MOST_RANKS else []
    if absent:
        which = ", ".join(map(str, absent[:10])) + (" ..." if len(absent) > 10 else "")
        yield f"Of {wanted} ranks {len(absent)} left no events: {which}."


def _lost_signals(attempts: Iterable[Attempt]) -> Iterator[str]:
    """Name signals whose handlers other code replaced: they left no event."""
    ranks_by_signals: dict[tuple[str, ...], dict[int, None]] = {}
    for attempt in attempts:
        if attempt.lost_signals:
            ranks_by_signals.setdefault(attempt.lost_signals, {})[attempt.rank] = None
    for signals, ranks in ranks_by_signals.items():
        which = ", ".join(map(str, list(ranks)[:10])) + (" ..." if len(ranks) > 10 else "")
        yield (
            f"Rank{'' if len(ranks) == 1 else 's'} {which}: other code replaced hydroslurm's "
            f"handlers of {', '.join(signals)}: pauses and stops requested with them meanwhile "
            "had no effect, and are not in this report."
        )


def _check(run_dir: RunDir) -> None:
    """Check the folder. A job that has not started has no events, but a submission."""
    wanted = (run_dir.events, run_dir.submission_json)
    if any(path.exists() for path in wanted):
        return
    seen = "there is no such folder"
    if run_dir.root.is_dir():
        names = sorted(path.name for path in run_dir.root.iterdir())
        seen = (
            f"it holds {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            if names
            else "it is empty"
        )
    elif run_dir.root.exists():
        seen = "it is a file"
    raise RunFolderError(
        f"{run_dir.root} is not a run folder: {seen}. "
        f"Looked for events/{run_dir.rank_events(0).name} and {run_dir.submission_json.name}. "
        "Give the folder that `hydroslurm submit` printed, or the one that HYDROSLURM_RUN_DIR named"
    )


# --- processes ----------------------------------------------------------------------------------

Item = TypeVar("Item")
Result = TypeVar("Result")

_work: tuple[Callable[[Any], Any], Sequence[Any]]
"""State of a worker process."""


def parallel_map(function: Callable[[Item], Result], items: Sequence[Item]) -> Iterator[Result]:
    """Apply ``function`` to each item in a separate process; results come in order.

    All processes start at once, as with ``Executor.map``; only taking a result waits. They are
    forked, so they share memory, and neither function nor items are pickled: a run is read once for
    any number of processes. Call this before other threads start (importing numpy starts some).

    Raises:
        RunFolderError: on taking a result whose process was killed.
    """
    if not items:
        return iter(())
    fork = multiprocessing.get_context("fork")
    # initargs are inherited, not pickled
    pool = ProcessPoolExecutor(len(items), fork, initializer=_begin, initargs=(function, items))
    futures = [pool.submit(_call, index) for index in range(len(items))]

    def results() -> Iterator[Result]:
        with pool:  # joins its thread, so that the next call may fork
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
