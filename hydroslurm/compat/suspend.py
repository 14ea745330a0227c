"""HFAI's suspend protocol, for loops that save in their own way.

    while training:
        step()
        if hydroslurm.receive_suspend_command():
            save_my_own_checkpoint()
            hydroslurm.go_suspend()          # requeues the job and does not come back

There any number of things may happen to the state between the two calls; what is saved, and
whether it is whole, is the loop's own affair. :class:`~hydroslurm.training.run.Run` does all three.

With several ranks each asks equally often, and all are told behind the same step, whichever of them
was signalled. DataLoader workers that are started from the first call on, or in a process that
could be paused before it, survive the signals as those of a ``Run`` do. A whole training:
``examples/train_two_calls.py``.
"""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import NoReturn

from hydroslurm.core.events import EventKind
from hydroslurm.errors import UsageError
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller, StopRequest
from hydroslurm.slurm.allocation import Allocation
from hydroslurm.training.rank_group import RankGroup
from hydroslurm.training.reporting import notice
from hydroslurm.training.requeue import StopHandler
from hydroslurm.training.stopping import agree_on_plan, exit_together


@dataclass
class _Protocol:
    """What the two calls have in common; one per controller."""

    controller: Controller
    rank_group: RankGroup
    stop_handler: StopHandler
    told: StopRequest | None = None


_protocol: _Protocol | None = None


def receive_suspend_command() -> bool:
    """Whether this process was asked to save and leave. Costs an attribute read.

    The first call takes SIGTERM and the warning signal over, and installs pausing where that was
    not done: make it before the training begins. Main thread only for the first call.

    Raises:
        InstallError, GateError: as :func:`hydroslurm.install`, at the first call.
        AgreementFailed, CoordinatorLost: a rank was asked to, and the ranks cannot stop at one
            step.
    """
    ours = _ours()
    if ours.told is None:
        ours.told = ours.rank_group.arrive()
    return ours.told is not None


def go_suspend() -> NoReturn:
    """Have the job requeued where that is wanted and possible, and leave.

    To be called once everything is saved, by all ranks. Leaves with the status that says what is to
    follow: 75, the same command continues; 143, a person cancelled the job.

    Raises:
        SystemExit: always.
        UsageError: nobody has asked for it.
    """
    ours = _ours()
    request = ours.told or (
        ours.controller.stop_request if ours.rank_group.world_size == 1 else None
    )
    if request is None:
        raise UsageError(
            "go_suspend() was called without a stop request; call it only after "
            "receive_suspend_command() has returned True"
        )
    ours.stop_handler.note_request(request)  # the controller's thread may be about to
    plan = agree_on_plan(ours.rank_group, ours.stop_handler)
    if ours.rank_group.rank == 0:
        notice(plan.message)
    raise exit_together(ours.rank_group, ours.stop_handler, plan)


def _ours() -> _Protocol:
    global _protocol
    if not installation.is_installed():
        _warn_of_workers()
        installation.install()
        _protocol = None
    controller = installation.controller()
    if _protocol is None or _protocol.controller is not controller:
        rank_group = RankGroup(controller)
        stop_handler = StopHandler(
            Allocation.from_environ(os.environ),
            controller,
            environ=dict(os.environ),
            reads_ahead=rank_group.rank == 0,
        )
        controller.claim_stops(stop_handler.note_request)
        controller.record(EventKind.STOPS_TAKEN, {"by": "receive_suspend_command"})
        _protocol = _Protocol(controller, rank_group, stop_handler)
    return _protocol


def _warn_of_workers() -> None:
    """Slurm signals all processes of a job step, and torch takes a dead worker for an error."""
    started = sum(process.daemon for process in multiprocessing.active_children())
    if started:
        notice(
            f"{started} process{'es' if started > 1 else ''} of multiprocessing (DataLoader "
            "workers?) began before the first receive_suspend_command(), and die of the SIGTERM "
            "that Slurm sends to every process of a job step: the save may be cut short. Call it "
            "once before the loop, or start the script with srun --preempt"
        )
