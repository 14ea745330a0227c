"""Which folder a run has, and whether this process may train there."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.core import rundir
from hydroslurm.core.fence import Claim, Fence
from hydroslurm.core.files import clean
from hydroslurm.core.rundir import ELASTIC_ENV, RUN_DIR_ENV, RunDir
from hydroslurm.errors import RunFolderError, UsageError
from hydroslurm.runtime import autoload
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller
from hydroslurm.slurm.allocation import ALONE_ENV, Allocation
from hydroslurm.training.attempts import finished_step, remove_finished
from hydroslurm.training.rank_group import RankGroup, notice


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
    found = installation.folder_of_job(environ)
    if found is None:
        raise UsageError(
            "this process is in no Slurm job, so that there is no run folder to save into; give "
            'one: Run(directory="runs/my-run")'
        )
    return RunDir(found.root.absolute()).claim()


def require_place(owner: str, environ: Mapping[str, str]) -> None:
    """Whether a run may begin here.

    Args:
        owner: who trains with a fixed number of ranks; nobody in a run whose members may change.

    Raises:
        UsageError: as a member of an elastic run; or not in the main thread.
    """
    if owner and environ.get(ELASTIC_ENV):
        raise UsageError(
            f"this is a member of an elastic job, and {owner} trains with a fixed number of "
            "ranks: each member would train alone. Set `engine: restart` in `elastic:`, which "
            "starts its ranks anew at each change, put hydroslurm.Run around a loop of your "
            "own, or leave `elastic:` out of the job spec"
        )
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        raise UsageError(
            f"Run(...) was called in thread {thread.name!r}; wanted the main thread, where Python "
            "handles the signals that stop a run. Make it there, train there, and leave the other "
            "work to threads"
        )


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


def install_for(run: RunDir, environ: Mapping[str, str]) -> tuple[Controller, bool]:
    """The controller of this process, and whether it was installed for this run."""
    before = installation.controller() if installation.is_installed() else None
    if before is not None and not installation.gives_way():
        return before, False
    # a pause that comes after the run must not end what has ended well
    autoload.keep_alive(autoload.killing(environ))
    of_job = rundir.from_environment(environ) is not None
    made = installation.install(run_dir=None if of_job else run.root, environ=environ)
    return made, made is not before


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
    elif beside and holder.pid != me.pid and _lives(holder, me):
        why = f"another training of this job is in {run_dir.root} ({clean(str(holder))})"
    if why:
        raise RunFolderError(
            f"{why}. A folder belongs to one training: give this one its own by "
            f"Run(directory=...), or {RUN_DIR_ENV} in the line that starts it"
        )


def _lives(holder: Claim, me: Claim) -> bool:
    from hydroslurm.slurm import run_folders  # for a second process of one start only

    return run_folders.lives(holder, me)


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
