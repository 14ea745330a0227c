"""Starting the hub, on rank 0, and finding it, on every rank."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydroslurm.errors import HubLost, StaleRank
from hydroslurm.runtime.ranks.frames import BadFrame, Unpacker, pack
from hydroslurm.runtime.ranks.hub import make_ready
from hydroslurm.runtime.world import LOOPBACK, World

START_S = 60.0
"""A Python on a busy node may take long to start."""
CONNECT_S = 5.0
RETRY_S = 0.2


def start_hub(world: World) -> int:
    """Start the hub of this life beside this process; returns its port.

    It belongs to no terminal, takes no signal, holds no output of ours, and ends by itself.

    Raises:
        HubLost: it could not be started, or found no free port.
    """
    options = {
        "life": world.life,
        "world_size": world.world_size,
        "host": world.host,
        "ports": world.hub_ports,
        "parent_pid": os.getpid(),
    }
    command = [sys.executable, "-m", "hydroslurm.runtime.ranks.hub", json.dumps(options)]
    # from its first moment: between exec and Python's first line a signal to the job would kill it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _package_path()},
            cwd="/",
        )
    except OSError as error:
        raise HubLost(f"the hub of the ranks could not be started: {error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    threading.Thread(target=process.wait, name="hydroslurm-hub", daemon=True).start()
    answer = _first_line(process)
    if "port" not in answer:
        words = answer.get("error", f"it said nothing within {START_S:g} s")
        raise HubLost(
            f"the hub of the ranks could not be started: {words}. It tries the ports "
            f"{min(world.hub_ports)} to {max(world.hub_ports)} of {world.host}"
        )
    return int(answer["port"])


def find_hub(
    world: World, who: Any, *, ports: tuple[int, ...], timeout_s: float, stop: Callable[[], bool]
) -> tuple[socket.socket, Unpacker, list[Any]]:
    """Join: look at the ports until the hub of this life answers.

    Returns:
        The connection, and what has come over it already.

    Raises:
        StaleRank: the hub of this life will not have this rank.
        HubLost: no such hub within ``timeout_s``, or ``stop()`` said so.
    """
    hello = {
        "do": "join",
        "life": world.life,
        "rank": world.rank,
        "world_size": world.world_size,
        "who": who,
    }
    host = LOOPBACK if world.rank == 0 and world.local_rank == 0 else world.host
    deadline_s, seen = time.monotonic() + timeout_s, "nobody listens"
    while time.monotonic() < deadline_s and not stop():
        for port in ports:
            for address in dict.fromkeys((host, world.host)):
                try:
                    return _try_port(address, port, hello)
                except OSError as error:
                    seen = f"{address}:{port}: {error}"
                except _Refused as refused:
                    seen = f"{address}:{port}: {refused}"
        threading.Event().wait(RETRY_S)
    raise HubLost(
        f"rank {world.rank} did not find the other ranks within {timeout_s:g} s; the last it saw: "
        f"{seen}. Rank 0 listens on {world.host} at one of the ports {min(ports)} to {max(ports)}: "
        "has it started, and may the nodes connect there? MASTER_ADDR names another host"
    )


class _Refused(Exception):
    """Another hub, or none of ours."""


def _try_port(host: str, port: int, hello: Any) -> tuple[socket.socket, Unpacker, list[Any]]:
    connection = socket.create_connection((host, port), timeout=CONNECT_S)
    try:
        if connection.getsockname() == connection.getpeername():
            raise OSError("nobody listens")  # TCP let us connect to ourselves
        connection.sendall(pack(hello))
        unpacker = Unpacker()
        messages: list[Any] = []
        while not messages:
            data = connection.recv(1 << 16)
            if not data:
                raise OSError("closed")
            messages = unpacker.feed(data)
    except BadFrame as error:
        connection.close()
        raise OSError(f"not a hub ({error})") from error
    except BaseException:
        connection.close()
        raise
    first = messages[0] if isinstance(messages[0], dict) else {}
    if first.get("say") == "welcome":
        connection.settimeout(None)
        make_ready(connection)
        return connection, unpacker, messages[1:]
    connection.close()
    if first.get("ours"):
        raise StaleRank(f"this process may not join the ranks of its job: {first.get('why')}")
    raise _Refused(str(first.get("why", "not a hub")))


def _first_line(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    deadline_s, line = time.monotonic() + START_S, b""
    with process.stdout as output:
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([output], [], [], left_s)[0]:
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
    ours = str(Path(__file__).resolve().parents[3])
    rest = os.environ.get("PYTHONPATH")
    return ours if not rest else f"{ours}{os.pathsep}{rest}"
