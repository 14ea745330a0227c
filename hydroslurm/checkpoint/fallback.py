"""The newest checkpoint of a folder that is good, with a warning about those that are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hydroslurm.checkpoint.catalog import Checkpoint, Problem, look
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.errors import CheckpointCorrupt, CheckpointError

LOOKS = 3
"""At a folder in which another process removes what has just been listed."""


def newest_good(
    directory: Path, *, verify: Callable[[Checkpoint], None], storage: Storage
) -> Checkpoint | None:
    """The newest that verifies; None when there is none at all.

    Falls back to older ones with one RuntimeWarning that names what was passed over and why.

    Raises:
        CheckpointCorrupt: there are some, and none is good.
    """
    for _ in range(LOOKS):
        found, vanished = _look(directory, verify=verify, storage=storage)
        if found is not None or not vanished:
            return found
    raise CheckpointCorrupt(
        f"all checkpoints in {directory} were removed by another process while they were read, "
        f"{LOOKS} times in a row"
    )


def _look(
    directory: Path, *, verify: Callable[[Checkpoint], None], storage: Storage
) -> tuple[Checkpoint | None, bool]:
    """What is found, and whether another process has removed something meanwhile: then it has
    committed something newer."""
    passed: list[CheckpointError] = []
    for one in reversed(look(directory, storage=storage)):
        try:
            if isinstance(one, Problem):
                raise one.error
            verify(one)
        except CheckpointError as error:
            if not _is_there(one.path, storage=storage):
                return None, True
            passed.append(error)
            continue
        if passed:
            _warn(passed, one)
        return one, False
    if not passed:
        return None, False
    raise CheckpointCorrupt(
        f"no checkpoint in {directory} can be loaded: {_joined(passed)}. To start "
        "from the beginning, move that folder away"
    )


def _is_there(path: Path, *, storage: Storage) -> bool:
    with suppress(OSError):
        return path.name in storage.listdir(path.parent)
    return True


def _warn(passed: Sequence[CheckpointError], taken: Checkpoint) -> None:
    warnings.warn(
        f"hydroslurm: passed over what cannot be loaded: {_joined(passed)}; going back to "
        f"{taken.path} (step {taken.step})",
        RuntimeWarning,
        stacklevel=4,
    )


def _joined(errors: Sequence[CheckpointError]) -> str:
    return "; ".join(map(str, errors))
