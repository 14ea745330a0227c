"""What of a checkpoint is this rank's, and what is not as it was when it was saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.newest import Found
from hydroslurm.checkpoint.rng import for_new_rank
from hydroslurm.checkpoint.store import State
from hydroslurm.errors import RunFolderError
from hydroslurm.training.composition import Composition, Loading, changes
from hydroslurm.training.objects import Objects
from hydroslurm.training.rank_group import RankGroup


def load_for(rank_group: RankGroup, found: Found, *, like: Any) -> State:
    """The state of a checkpoint, as this rank resumes from it.

    With another world size than at the save, no rank can take over a saved rank's own state as it
    is. It still gets what all ranks share; its position in the data is that of rank 0, which counts
    what all ranks have consumed; its random numbers are its own if a rank of this number took part
    in the save, otherwise they are derived from those of rank 0.

    Args:
        like: the templates of sharded tensors (:meth:`CheckpointStore.load`).
    """
    state = found.store.load(found.checkpoint, like=like)
    if found.checkpoint.manifest.world_size == rank_group.world_size:
        return state
    first: Mapping[str, Any] = found.store.load_own(found.checkpoint, 0)
    rng = state.own.get("rng") or for_new_rank(first["rng"], rank_group.rank)
    return State(shared=state.shared, own={**first, "rng": rng})


def differences(
    rank_group: RankGroup, found: Found, state: State, *, objects: Objects, loading: Loading
) -> Iterator[str]:
    """Report what has changed since the checkpoint was saved. Of the loaders, which may differ per
    rank, only rank 0 reports.

    Raises:
        StateMismatch: the run cannot resume from it.
    """
    manifest = found.checkpoint.manifest
    yield from objects.changes(state.shared, classes=Composition.of(manifest).classes)
    if rank_group.rank == 0:
        data, world_size = state.own.get("data"), rank_group.world_size
        yield from changes(manifest, loading, world_size=world_size, data=data)


def set_aside(checkpoints: Path) -> Path | None:
    """Rename a folder of checkpoints, for a run that starts over: a later attempt would otherwise
    resume from the newest of them, which is further. Returns None if there is no such folder.

    Raises:
        RunFolderError: it cannot be renamed.
    """
    number = 1
    while (aside := checkpoints.with_name(f"{checkpoints.name}-set-aside-{number}")).exists():
        number += 1
    try:
        checkpoints.rename(aside)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunFolderError(
            f"{checkpoints} cannot be set aside for a new run: {error.strerror}. Move it away by "
            "hand, or give another directory="
        ) from error
    return aside
