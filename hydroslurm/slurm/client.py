"""The entry point for talking to Slurm, and the choice of the backend.

client = open_client()
client.job(123).state
client.why                    # "commands: pyslurm is not installed"
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping

from hydroslurm.errors import SlurmMissing, UsageError
from hydroslurm.slurm import pyslurm_backend
from hydroslurm.slurm.commands import SlurmClient
from hydroslurm.slurm.config import Config, find_slurm_conf
from hydroslurm.slurm.programs import RetryPolicy
from hydroslurm.slurm.values import Job, JobState, Partition, Qos

__all__ = [
    "BACKEND_ENV",
    "Config",
    "Job",
    "JobState",
    "Partition",
    "Qos",
    "RetryPolicy",
    "SlurmClient",
    "open_client",
]

BACKEND_ENV = "HYDROSLURM_SLURM_BACKEND"
"""Environment variable that chooses the backend: ``commands`` or ``pyslurm``."""

_PROBE_TIMEOUT_S = 10.0

_bound_conf: str | None = None
"""The slurm.conf that libslurm of this process has read: it reads one when pyslurm is imported, and
asks that cluster from then on, whatever SLURM_CONF becomes (seen on 25.11.7)."""


def open_client(
    prefer: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    retry_policy: RetryPolicy | None = None,
) -> SlurmClient:
    """Choose a backend: pyslurm if it works, else Slurm's own programs.

    Where pyslurm is installed, a child process makes one request with it first. If that fails, or
    a request later on, this process uses the programs from then on, and a line of the log says so.

    Args:
        prefer: ``"commands"`` or ``"pyslurm"``; None: HYDROSLURM_SLURM_BACKEND, else what works.
        environ: for the programs, most of all SLURM_CONF and PATH; None: a copy of this process's.
            pyslurm reads this process's own, so another SLURM_CONF rules it out.
        retry_policy: time-outs and retries.

    Raises:
        UsageError: no such backend.
        SlurmMissing: pyslurm was asked for and cannot be used; the message says why.
    """
    environ = dict(os.environ if environ is None else environ)
    retry_policy = retry_policy or RetryPolicy()
    source = "asked for by the caller"
    if prefer is None and environ.get(BACKEND_ENV):
        prefer, source = environ[BACKEND_ENV], f"asked for by {BACKEND_ENV}"
    if prefer not in (None, "commands", "pyslurm"):
        raise UsageError(
            f"no Slurm backend {prefer!r} ({source}); there are 'commands' and 'pyslurm'"
        )
    if prefer == "commands":
        return SlurmClient(environ, retry_policy=retry_policy, why=f"commands: {source}")
    global _bound_conf
    obstacle = _pyslurm_obstacle(environ)
    if not obstacle and _bound_conf is None:
        obstacle = _probe(min(_PROBE_TIMEOUT_S, retry_policy.call_timeout_s))
        if obstacle and prefer is None:
            pyslurm_backend.give_up(obstacle)
    if not obstacle:
        _bound_conf = _conf_name(environ)
        reason = source if prefer else f"it answers, and {find_slurm_conf(environ)} exists"
        return pyslurm_backend.PyslurmClient(
            environ, retry_policy=retry_policy, why=f"pyslurm: {reason}"
        )
    if prefer == "pyslurm":
        raise SlurmMissing(f"the pyslurm backend was {source}, but {obstacle}")
    return SlurmClient(environ, retry_policy=retry_policy, why=f"commands: {obstacle}")


def _conf_name(environ: Mapping[str, str]) -> str | None:
    """The canonical path of the slurm.conf."""
    conf = find_slurm_conf(environ)
    return None if conf is None else os.path.realpath(conf)


def _pyslurm_obstacle(environ: Mapping[str, str]) -> str:
    """Why pyslurm cannot be tried, empty when it can. Never imports it into this process."""
    if importlib.util.find_spec("pyslurm") is None:
        return "pyslurm is not installed"
    if environ.get("SLURM_CONF") != os.environ.get("SLURM_CONF"):
        return "pyslurm cannot be given another SLURM_CONF than this process has"
    wanted = _conf_name(environ)
    if wanted is None:
        return "there is no slurm.conf, without which importing pyslurm ends the process"
    if _bound_conf is not None and wanted != _bound_conf:
        return (
            f"pyslurm in this process goes on asking the cluster of {_bound_conf}, which it read "
            f"first; a process of its own can use it for {wanted}"
        )
    if _bound_conf is None and "pyslurm" in sys.modules:
        return (
            "something else has imported pyslurm in this process, and which slurm.conf it read is "
            "not known; call open_client() before that"
        )
    return pyslurm_backend.failure


def _probe(timeout_s: float) -> str:
    """Why a request of pyslurm's fails; empty if one succeeds. In a child: pyslurm calls exit() for
    a slurm.conf that it cannot read, and fails for another release of libslurm. A controller older
    than libslurm refuses every request: "Protocol authentication error".
    """
    code = (
        "import sys; sys.path[:1] == [''] and sys.path.pop(0); "  # not a module of the user's
        "import pyslurm; pyslurm.Jobs, pyslurm.Partitions; pyslurm.slurmctld.Config.load()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pyslurm got no answer within {timeout_s:g} s"
    except OSError as error:
        return f"pyslurm could not be tried ({error})"
    if done.returncode == 0:
        return ""
    message = done.stderr.decode(errors="replace").strip().splitlines() or ["no reason given"]
    return f"pyslurm does not work here ({message[-1][:200]})"
