"""HFAI's suspend protocol, for loops that do their own saving.

    while training:
        step()
        if hydroslurm.receive_suspend_command():
            save_my_own_checkpoint()
            hydroslurm.go_suspend()          # requeues the job and does not return

The state may change between the two calls; the loop decides what is saved, and whether it is
complete. :class:`~hydroslurm.training.run.Run` takes care of all three.

All ranks must call it equally often; all get the same answer after the same step, whichever of them
was signalled. DataLoader workers started after the first call, or in a process that was already
pausable, survive the signals as those of a ``Run`` do.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from typing import NoReturn

from hydroslurm.core.events import EventKind
from hydroslurm.errors import UsageError
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.rank_group import RankGroup, notice, warning
from hydroslurm.training.stopping import StopHandler


class _Protocol:
    """State shared by the two calls; one per controller."""

    def __init__(self, controller: Controller) -> None:
        self.controller, self.rank_group = controller, RankGroup(controller)
        self.stop_handler = StopHandler(
            Allocation.from_environ(os.environ), controller, self.rank_group, environ=os.environ
        )
        self.request: StopRequest | None = None
        controller.claim_stops(self.stop_handler.note_request)
        controller.record(EventKind.STOPS_TAKEN, {"by": "receive_suspend_command"})


_protocol_of = functools.lru_cache(maxsize=1)(_Protocol)


def receive_suspend_command() -> bool:
    """Whether this process was asked to save and exit. Costs an attribute read.

    The first call takes over SIGTERM and the warning signal, and installs pausing if that has not
    been done: make it before training begins, in the main thread.

    Raises:
        InstallError, GateError: as :func:`hydroslurm.install`, at the first call.
        AgreementFailed, CoordinatorLost: a rank was asked to stop, and the ranks cannot stop at the
            same step.
    """
    ours = _ours()
    if ours.request is None:
        ours.request = ours.rank_group.arrive()
    return ours.request is not None


def go_suspend() -> NoReturn:
    """Requeue the job if wanted and possible, and exit.

    All ranks must call it, once everything is saved. The exit status says what follows: 75, the
    same command resumes; 143, the job was cancelled.

    Raises:
        SystemExit: always.
        UsageError: no stop was requested.
    """
    ours = _ours()
    request = ours.request or (
        ours.controller.stop_request if ours.rank_group.world_size == 1 else None
    )
    if request is None:
        raise UsageError(
            "go_suspend() was called without a stop request; call it only after "
            "receive_suspend_command() has returned True"
        )
    ours.stop_handler.note_request(request)  # in case the controller's thread has not yet
    plan = ours.stop_handler.agree()
    ours.rank_group.log(plan.message, log=notice)
    raise ours.stop_handler.exit(plan)


def _ours() -> _Protocol:
    if not installation.is_installed():
        _warn_of_workers()
        installation.install()
    return _protocol_of(installation.controller())


def _warn_of_workers() -> None:
    """Slurm signals all processes of a job step, and torch treats a dead worker as an error."""
    started = sum(process.daemon for process in multiprocessing.active_children())
    if started:
        warning(
            f"{started} process{'es' if started > 1 else ''} of multiprocessing (DataLoader "
            "workers?) started before the first receive_suspend_command(), and will die of the "
            "SIGTERM that Slurm sends to every process of a job step: the save may be cut short. "
            "Call it once before the loop, or start the script with srun --preempt"
        )
