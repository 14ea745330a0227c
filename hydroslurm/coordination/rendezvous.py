"""Where the ranks of a job step meet: the coordinator's process, their shared key, torch's store.

Torch's store has no authentication: a process that reaches it can read and change its contents.
So it listens at the one address that is needed, at a port derived from the key. That keeps most
out. Another user of the same nodes can still find the port by trying all of them; only exclusive
nodes (``--exclusive``) prevent that.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydroslurm.coordination.network import listen, located, set_master_addr
from hydroslurm.coordination.secret import Secret, find_secret
from hydroslurm.coordination.world import KEY_ENV, World, key_from, set_torch_variables
from hydroslurm.core import registry
from hydroslurm.core.proc import module_command
from hydroslurm.core.threads import thread
from hydroslurm.errors import CoordinatorLost, RunFolderError
from hydroslurm.slurm import run_folders

if TYPE_CHECKING:  # a task that becomes a rank needs neither end of the connection
    from hydroslurm.coordination.coordinator import CoordinatorOptions

MEET_S = 600.0
"""Time for ranks to find each other: nodes boot, images are fetched."""

_store: Any = None
"""Torch's, on the first rank; it ends with this reference."""
START_S = 60.0
"""Python may take long to start on a busy node."""

_started: dict[tuple[int, str], tuple[subprocess.Popen[bytes], int]] = {}


def set_torch_environment(environ: MutableMapping[str, str] | None = None) -> World:
    """Set the variables that ``init_process_group()`` reads, in ranks that srun has started.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A value that
    exists is kept: torchrun's workers have all of them. MASTER_ADDR is the name of the first node,
    or the address that Slurm has for it if that name does not resolve. The port is derived from the
    key of this attempt, so neither ranks of an earlier attempt nor strangers can connect. If the
    key is not in the environment, the ranks wait here until the first rank has given it to them.
    The first rank opens torch's store, which then listens at MASTER_ADDR and nowhere else.

    Args:
        environ: changed in place, and nothing else is done; default: ``os.environ``.

    Raises:
        UsageError: a variable has a value that neither torchrun nor Slurm gives.
        NoSecret: there are several ranks, and they have nothing to authenticate with.
        CoordinatorLost: the first rank did not come, or its node cannot be found.
    """
    ours = environ is None or environ is os.environ
    environ = os.environ if environ is None else environ
    world = World.from_environ(environ)
    if ours:
        world = set_master_addr(world, environ)
    chooses_port = world.world_size > 1 and not environ.get("MASTER_PORT")
    key = step_key(world, environ) if ours and chooses_port else key_from(environ)
    set_torch_variables(environ, world, key)
    if ours and chooses_port and world.rank == 0:
        _open_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), world.world_size)
    return world


def step_key(
    world: World, environ: Mapping[str, str], *, stop: Callable[[], bool] = lambda: False
) -> bytes:
    """Return the key of this attempt, the same for all its ranks; may wait for it.

    Args:
        stop: asked while waiting; True gives up.

    Raises:
        NoSecret: there is no way to agree on one.
        CoordinatorLost: the first rank, which has it, did not come within :data:`MEET_S`.
    """
    secret = find_secret(world, environ, folder=key_folder(world, environ))
    if secret.source == "environment" or world.rank == 0:
        assert secret.key is not None
        if secret.source != "environment":
            start_coordinator(world, secret)
        return secret.key
    from hydroslurm.coordination.channel import find_coordinator

    ports = world.coordinator_ports(secret.port_key)
    found = find_coordinator(world, secret, ports=ports, timeout_s=MEET_S, stop=stop)
    found.socket.close()
    return found.session.key


def key_folder(
    world: World, environ: Mapping[str, str], *, run_dir: str | os.PathLike[str] | None = None
) -> Path | None:
    """Return where the ranks' key may be kept as a file: the run folder; without one, ranks of one
    machine use this user's private folder there. None if there is neither.

    Args:
        run_dir: the run folder that was given, if one was.
    """
    if run_dir is not None:
        return Path(run_dir).absolute()
    with contextlib.suppress(RunFolderError):  # a Run reports it; ranks that only pause need none
        run = run_folders.from_environment(environ)
        if run is not None:
            return run.root
    if world.local_world_size == world.world_size:
        with contextlib.suppress(RunFolderError):
            return registry.folder(environ)
    return None


def start_coordinator(world: World, secret: Secret) -> int:
    """Start the coordinator of this attempt beside this process, unless it runs; return its port.

    It has no terminal, blocks all signals, holds no output of this process, and ends by itself. Its
    options, including the key, go through a pipe: everybody can read a command line.

    Raises:
        CoordinatorLost: it could not be started, or found no free port.
    """
    process, port = _started.get((os.getpid(), world.incarnation_id), (None, 0))
    if process is not None and process.returncode is None:
        return port
    from hydroslurm.coordination.coordinator import CoordinatorOptions
    from hydroslurm.slurm.munge import MungeError

    assert secret.key is not None
    try:
        credentials = secret.credentials(world)
    except MungeError as error:
        raise CoordinatorLost(f"MUNGE does not give the ranks their key: {error}") from error
    options = CoordinatorOptions(
        incarnation_id=world.incarnation_id,
        world_size=world.world_size,
        host=located(world).host,
        ports=world.coordinator_ports(secret.port_key),
        parent_pid=os.getpid(),
        key=secret.key.hex(),
        credentials=[credential.decode("ascii") for credential in credentials],
    )
    process = _launch(options)
    # only that thread calls poll(): a return code means that the process is gone
    thread(process.wait, name="hydroslurm-coordinator").start()
    answer = _first_line(process)
    if "port" not in answer:
        raise CoordinatorLost(
            f"the coordinator of the ranks could not be started: {answer.get('error')}. It tries "
            f"the ports {min(options.ports)} to {max(options.ports)} of {world.host}"
        )
    port = int(answer["port"])
    _started[os.getpid(), world.incarnation_id] = process, port
    return port


def _open_store(host: str, port: int, world_size: int) -> None:
    """Open torch's store at one address. torch uses a store that its process already has, instead
    of opening one that listens at all addresses."""
    global _store
    from torch._C._distributed_c10d import TCPStore

    # should the port be taken, init_process_group() is about to say so
    with contextlib.suppress(OSError), listen(host, [port]) as listener:
        _store = TCPStore(
            host,
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )


def _launch(options: CoordinatorOptions) -> subprocess.Popen[bytes]:
    command = module_command(sys.executable, "hydroslurm.coordination.coordinator")
    environ = {name: value for name, value in os.environ.items() if name != KEY_ENV}
    # blocked from its first moment: between exec and Python's first line a signal would kill it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**environ, "PYTHONPATH": _package_path()},
            cwd="/",
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps(asdict(options)).encode() + b"\n")
    except OSError as error:
        raise CoordinatorLost(
            f"the coordinator of the ranks could not be started: {error}"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _first_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    with process.stdout as output:
        watch = select.poll()
        watch.register(output, select.POLLIN)
        if not watch.poll(START_S * 1e3):
            return {"error": f"no answer within {START_S:g} s"}
        line = os.read(output.fileno(), select.PIPE_BUF)  # it is written by one call
    try:
        answer = json.loads(line)
    except ValueError:
        return {"error": line.decode(errors="replace") or "it ended at once"}
    return answer if isinstance(answer, dict) else {}


def _package_path() -> str:
    """PYTHONPATH that has this very package, also if it is not installed."""
    ours = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    return ours if not rest else f"{ours}{os.pathsep}{rest}"
