"""Read many large event files with as many processes as this one may use.

A million lines take one process half a minute. Ranks have files of their own, which nobody has to
read in order, so that each child reads some and hands back what it has made of them.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hydroslurm.report.aside import Aside

_WORTH_IT_BYTES = 16 * 2**20
"""Below, forking and handing back costs more than it saves."""

Result = TypeVar("Result")


def in_shares(
    files: Sequence[Path], read: Callable[[Sequence[Path]], Result], *, most: int | None = None
) -> list[Result]:
    """What ``read`` makes of each share of the files, together all of them, in no order. One share,
    in this process, where they are small.

    Raises:
        OSError: a file cannot be read.
    """
    sizes = {path: path.lstat().st_size for path in files}
    count = min(most or len(os.sched_getaffinity(0)), len(files))
    if count < 2 or sum(sizes.values()) < _WORTH_IT_BYTES:
        return [read(files)]
    shares: list[list[Path]] = [[] for _ in range(count)]
    held = [0] * count
    for path in sorted(files, key=lambda path: sizes[path], reverse=True):
        least = held.index(min(held))
        shares[least].append(path)
        held[least] += sizes[path]
    others = [_reader(read, share) for share in shares[1:]]
    try:
        results = [read(shares[0])]
    finally:
        answers = [other.answer() for other in others]
    return [*results, *(_opened(answer) for answer in answers)]


def _reader(read: Callable[[Sequence[Path]], Any], share: Sequence[Path]) -> Aside:
    def work() -> bytes:
        try:
            return pickle.dumps(read(share), protocol=pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            return pickle.dumps(OSError(error.errno, error.strerror, error.filename))

    return Aside(work)


def _opened(answer: bytes) -> Any:
    """Made by this very program a moment ago."""
    result = pickle.loads(answer)
    if isinstance(result, OSError):
        raise result
    return result
