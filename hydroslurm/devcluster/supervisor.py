"""The process that owns all daemons of one dev cluster, run as ``python -m`` this module.

Its argument is the request; it answers with one line of JSON on stdout: ``{}`` once the cluster is
up, or ``{"error": ...}``. It lives until SIGTERM, or until its caller is gone, unless that asked to
detach. However it ends, even by SIGKILL, the daemons end, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import sys
import traceback
from dataclasses import replace

from hydroslurm.core.proc import adopt_orphans
from hydroslurm.devcluster import cgroups
from hydroslurm.devcluster.bringup import Bringup, Control, StopRequested
from hydroslurm.devcluster.config import Place, Ports
from hydroslurm.devcluster.layout import Layout, locked, make_link, remove_link
from hydroslurm.devcluster.processes import (
    ProcessId,
    Request,
    Running,
    cancel_jobs,
    end_all,
    reap,
    sweep,
)
from hydroslurm.devcluster.programs import find_programs, search_path
from hydroslurm.errors import ClusterError, HydroslurmError

_STDOUT = 1
_CHECK_S = 0.5
"""Interval of checks on the caller."""


def main() -> None:
    """Serve one cluster from its start to its end."""
    request = Request.from_json(sys.argv[1])
    if request.detach and os.fork():
        # The caller reaps its direct child. Fork only with `detach`: where nothing reaps orphans,
        # as in many containers, this process would stay a zombie.
        os._exit(0)
    control = Control(request.caller)
    adopt_orphans()
    assert request.spec.directory is not None
    layout = Layout.at(request.spec.directory)
    try:
        with locked(layout):
            _serve(request, layout, control)
    except StopRequested as reason:
        _log(f"ended: {reason}")
    except HydroslurmError as error:
        _log(str(error))
        _tell({"error": str(error)})
    except Exception as error:
        # a temporary folder and its log are already gone, so tell the caller
        _log(traceback.format_exc())
        _tell({"error": f"the cluster's supervisor failed: {error!r}. {traceback.format_exc()}"})


def _serve(request: Request, layout: Layout, control: Control) -> None:
    before = Running.read(layout)
    if before is not None:
        _log("removing what a killed cluster left here")
        sweep(layout, replace(before, temporary=False))
    cgroups.require_own_names(request.spec)
    layout.remove_state()
    layout.create()
    layout.remove_logs()
    programs = find_programs(search_path(os.environ.get("PATH")))
    user = _user_name()
    link = make_link(layout.root)
    ports = Ports.reserve(request.spec.nodes)
    place = Place(link, os.uname().nodename, user, _memory_mb(), programs.plugins)
    me = ProcessId.of(os.getpid())
    assert me is not None
    running = Running(request.spec, request.temporary, link, me)
    bringup = Bringup(request.spec, layout, place, ports, programs, control)
    try:
        running.write(layout)
        bringup.run()
        pids = tuple((daemon.name, daemon.id or me) for daemon in bringup.daemons)
        replace(running, daemons=pids, no_preempt=bringup.no_preempt).write(layout)
        _tell({})
        if request.detach:
            control.caller = None
        _stand_by(bringup, control)
    finally:
        if bringup.has_controller:
            cancel_jobs(programs["scancel"], user=user, environ=bringup.environ())
        end_all(bringup.daemons, request.spec)
        ports.release()
        remove_link(link)
        layout.remove_state()
        if request.temporary:
            layout.remove_all()


def _stand_by(bringup: Bringup, control: Control) -> None:
    """Reap children until told to end. Do not restart a daemon that dies: `status` shows it, and
    its log stays."""
    gone: set[str] = set()
    while True:
        control.wait(_CHECK_S)
        reap(bringup.daemons)
        for daemon in bringup.daemons:
            if daemon.process.returncode is not None and daemon.name not in gone:
                gone.add(daemon.name)
                _log(f"{daemon.name} ended, status {daemon.process.returncode}")


def _tell(answer: dict[str, str]) -> None:
    with contextlib.suppress(OSError):  # the caller is gone
        os.write(_STDOUT, json.dumps(answer).encode() + b"\n")


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"supervisor: {text}\n")
        sys.stderr.flush()


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise ClusterError(
            f"user id {os.geteuid()} has no name on this machine (no passwd entry), and Slurm runs "
            "jobs of named users only. Use another user, or add an entry"
        ) from None


def _memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


if __name__ == "__main__":
    main()
