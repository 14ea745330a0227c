"""Which folder a run has, and whether this process may train there; what of a checkpoint is this
rank's, and what is not as it was when it was saved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.manifest import Manifest
from hydroslurm.checkpoint.rng import for_new_rank
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.core.fence import Fence
from hydroslurm.core.files import clean
from hydroslurm.core.rundir import RUN_DIR_ENV, RunDir
from hydroslurm.errors import RunFolderError, UsageError
from hydroslurm.slurm import run_folders
from hydroslurm.slurm.allocation import ALONE_ENV, Allocation
from hydroslurm.training.attempts import finished_step, remove_finished
from hydroslurm.training.objects import Composition, Loading, Objects, changes
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import notice


def run_directory(given: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> RunDir:
    """Where the run keeps its state: the folder that was named, else that of this training in the
    job.

    It is made here, that of the job for its owner only: its name can be guessed.

    Raises:
        UsageError: neither is there; or an empty name, which would be the current folder.
        RunFolderError: others may have put something there that a run would obey.
    """
    if given is not None:
        if not os.fspath(given):
            raise UsageError(
                'directory="": wanted a folder\'s name, such as "runs/my-run" ("." for the current '
                "folder), or None for that of the job. Is a variable empty?"
            )
        return RunDir(Path(given).absolute()).claim(mode=0o775)
    found = run_folders.from_environment(environ)
    if found is None:
        raise UsageError(
            "this process is in no Slurm job, so that there is no run folder to save into; give "
            'one: Run(directory="runs/my-run")'
        )
    return RunDir(found.root.absolute()).claim()


def fence_of(run: RunDir, allocation: Allocation | None) -> Fence:
    """For what this process writes into the run's folder."""
    if allocation is None:
        return Fence(run.claim_json)
    return Fence(
        run.claim_json,
        cluster=allocation.cluster_name,
        job_id=allocation.job_id,
        restart_count=allocation.restart_count,
        step_id="" if allocation.step_id is None else str(allocation.step_id),
    )


def enter(run_dir: RunDir, *, fence: Fence, store: CheckpointStore, anew: bool) -> dict[str, Any]:
    """Claim a run's folder for all ranks, unless there is nothing left to do in it.

    Args:
        anew: set aside what is there. Nothing of it may be taken for this run's, now or by a later
            attempt.

    Returns:
        ``finished``, the step at which the run has finished or None, and the fence's ``claim``.

    Raises:
        RunFolderError: as :func:`require_own`.
    """
    require_own(run_dir, fence=fence, anew=anew)
    done = None if anew else finished_step(run_dir)
    claim = None
    if done is None:
        claim = fence.claim()
        store.revoke_others()
        if anew:
            remove_finished(run_dir)
            if (aside := set_aside(store.directory)) is not None:
                notice(f"resume=False: what was committed is in {aside} now")
        done = finished_step(run_dir)  # an older attempt may have been about to write it
    return {"finished": done, "claim": claim}


def require_one_folder(rank_group: RankGroup, run_dir: RunDir) -> None:
    """Check that all ranks of the job step are in one training.

    Raises:
        RunFolderError: they have come to different run folders.
    """
    if rank_group.world_size == 1:
        return
    found = rank_group.exchange("folder", run_dir.root.name)
    other = next((rank for rank, name in found.items() if name != found[0]), None)
    if other is not None:
        raise RunFolderError(
            f"the {rank_group.world_size} tasks of this job step are not ranks of one training: "
            f"rank 0 has the run folder {found[0]}, rank {other} has {found[other]}, since their "
            f"command lines differ. If each trains by itself, set {ALONE_ENV}=1; if they train "
            "together, give all the same Run(directory=...)"
        )


def require_own(run_dir: RunDir, *, fence: Fence, anew: bool = False) -> None:
    """Check that the folder is of this training.

    Raises:
        RunFolderError: another script has trained there; or another line of this start of the job
            has finished there; or a process of this start does train there now.
    """
    me, holder = fence.me, fence.holder()
    if holder is None or holder.token == me.token:
        return
    beside = holder.is_of_start(me)
    is_other = beside and holder.command != me.command and run_dir.finished_json.exists()
    why = ""
    if not anew and (is_other or (me.script and holder.script and me.script != holder.script)):
        why = (
            f"{run_dir.root} is the run folder of {clean(holder.script) or 'another command'} "
            f"({clean(str(holder))}), and this is {me.script or 'another one'}: nothing of it was "
            f"loaded. If it is the same training, remove {run_dir.claim_json.name} there"
        )
    elif beside and holder.pid != me.pid and run_folders.lives(holder, me):
        why = f"another training of this job is in {run_dir.root} ({clean(str(holder))})"
    if why:
        raise RunFolderError(
            f"{why}. A folder belongs to one training: give this one its own by "
            f"Run(directory=...), or {RUN_DIR_ENV} in the line that starts it"
        )


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


# --- what of a checkpoint is this rank's
# ------------------------------------------------------------------------------------------------

_OF_A_RANK = ("rng", "registered", "new_rank", "script")


def load_for(
    rank_group: RankGroup, store: CheckpointStore, checkpoint: Checkpoint, *, like: Any
) -> State:
    """The state of a checkpoint, as this rank resumes from it.

    With another world size than at the save, no rank can take over a saved rank's own state as it
    is. It still gets what all ranks share; its position in the data is that of rank 0, which counts
    what all ranks have consumed; its random numbers, and what else it has registered for itself,
    are its own if a rank of this number took part in the save, otherwise those of rank 0, from
    which its random numbers are derived.

    Args:
        like: the templates of sharded tensors (:meth:`CheckpointStore.load`).
    """
    state = store.load(checkpoint, like=like)
    if checkpoint.manifest.world_size == rank_group.world_size:
        return state
    first: Mapping[str, Any] = store.load_own(checkpoint, 0)
    if "rng" in state.own:
        kept = {key: state.own[key] for key in _OF_A_RANK if key in state.own}
    else:
        rng = for_new_rank(first["rng"], rank_group.rank)
        kept = {"rng": rng, "new_rank": rank_group.rank}
    return State(shared=state.shared, own={**first, **kept})


def differences(
    rank_group: RankGroup, manifest: Manifest, state: State, *, objects: Objects, loading: Loading
) -> Iterator[str]:
    """Report what has changed since the checkpoint was saved. Of the loaders, which may differ per
    rank, only rank 0 reports.

    Raises:
        StateMismatch: the run cannot resume from it.
    """
    yield from objects.changes(state.shared, classes=Composition.of(manifest).classes)
    if rank_group.rank == 0:
        data, world_size = state.own.get("data"), rank_group.world_size
        yield from changes(manifest, loading, world_size=world_size, data=data)
