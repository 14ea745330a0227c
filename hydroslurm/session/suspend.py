"""HFAI's suspend protocol, for loops that save in their own way.

    while training:
        step()
        if hydroslurm.receive_suspend_command():
            save_my_own_checkpoint()
            hydroslurm.go_suspend()          # requeues the job and does not come back

There any number of things may happen to the state between the two calls; what is saved, and
whether it is whole, is the loop's own affair. :class:`~hydroslurm.session.run.Run` does all three.
"""

from __future__ import annotations

import os
from typing import NoReturn

from hydroslurm.errors import UsageError
from hydroslurm.runtime import install as installation
from hydroslurm.runtime.controller import Controller
from hydroslurm.session.leaving import Leaver
from hydroslurm.session.notice import notice
from hydroslurm.slurm.allocation import Allocation

_leaver: tuple[Controller, Leaver] | None = None


def receive_suspend_command() -> bool:
    """Whether this process was asked to save and leave. Costs an attribute read.

    The first call takes SIGTERM and the warning signal over, and installs pausing where that was
    not done: make it before the training begins. Main thread only for the first call.

    Raises:
        InstallError, GateError: as :func:`hydroslurm.install`, at the first call.
    """
    return _protocol()[0].stop_request is not None


def go_suspend() -> NoReturn:
    """Have the job requeued where that is wanted and possible, and leave.

    To be called once everything is saved. Leaves with the status that says what is to follow: 75,
    the same command continues; 143, a person cancelled the job.

    Raises:
        SystemExit: always.
        UsageError: nobody has asked for it.
    """
    controller, leaver = _protocol()
    if controller.stop_request is None:
        raise UsageError(
            "go_suspend() was called without a stop request; call it only after "
            "receive_suspend_command() has returned True"
        )
    leaver.hear(controller.stop_request)  # the controller's thread may be about to
    orders = leaver.orders()
    notice(orders.words)
    raise leaver.depart(orders)


def _protocol() -> tuple[Controller, Leaver]:
    global _leaver
    if not installation.is_installed():
        installation.install()
        _leaver = None
    controller = installation.controller()
    if _leaver is None or _leaver[0] is not controller:
        leaver = Leaver(Allocation.from_environ(os.environ), controller, environ=dict(os.environ))
        controller.claim_stops(leaver.hear)
        _leaver = (controller, leaver)
    return _leaver
