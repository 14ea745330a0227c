"""Starting the hub, on rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydroslurm.coordination.address import located
from hydroslurm.coordination.connection import Options
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import KEY_ENV, World
from hydroslurm.errors import HubLost

START_S = 60.0
"""A Python on a busy node may take long to start."""


_started: dict[tuple[int, str], tuple[subprocess.Popen[bytes], int]] = {}


def start_hub(world: World, secret: Secret) -> int:
    """The port of the hub of this attempt, which is started beside this process when none runs.

    It belongs to no terminal, takes no signal, holds no output of ours, and ends by itself. What it
    is told, the key among it, goes through a pipe: a command line can be read by everybody.

    Raises:
        HubLost: it could not be started, or found no free port.
    """
    process, port = _started.get((os.getpid(), world.life), (None, 0))
    if process is not None and process.returncode is None:
        return port
    assert secret.key is not None
    options = Options(
        life=world.life,
        world_size=world.world_size,
        host=located(world).host,
        ports=world.hub_ports(secret.port_key),
        parent_pid=os.getpid(),
        key=secret.key.hex(),
        munge_socket=secret.munge_socket,
    )
    process = _launch(options)
    # poll() is called there only: whoever sees a return code knows that the process is gone
    threading.Thread(target=process.wait, name="hydroslurm-hub", daemon=True).start()
    answer = _first_line(process)
    if "port" not in answer:
        words = answer.get("error", f"it said nothing within {START_S:g} s")
        raise HubLost(
            f"the hub of the ranks could not be started: {words}. It tries the ports "
            f"{min(options.ports)} to {max(options.ports)} of {world.host}"
        )
    port = int(answer["port"])
    _started[os.getpid(), world.life] = process, port
    return port


def _launch(options: Options) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hydroslurm.coordination.coordinator"]
    environ = {name: value for name, value in os.environ.items() if name != KEY_ENV}
    # from its first moment: between exec and Python's first line a signal to the job would kill it
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
        with contextlib.suppress(BrokenPipeError), process.stdin as told:
            told.write(json.dumps(asdict(options)).encode() + b"\n")
    except OSError as error:
        raise HubLost(f"the hub of the ranks could not be started: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _first_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    deadline_s, line = time.monotonic() + START_S, b""
    with process.stdout as output:
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            watch = select.poll()
            watch.register(output, select.POLLIN)
            if left_s <= 0 or not watch.poll(left_s * 1e3):
                break
            data = os.read(output.fileno(), 4096)
            if not data:
                break
            line += data
    try:
        answer = json.loads(line)
    except ValueError:
        return {"error": "it ended at once"} if line == b"" else {"error": line.decode("replace")}
    return answer if isinstance(answer, dict) else {}


def _package_path() -> str:
    """Where the package of now lies, also where it is not installed."""
    ours = str(Path(__file__).resolve().parents[2])
    rest = os.environ.get("PYTHONPATH")
    return ours if not rest else f"{ours}{os.pathsep}{rest}"
