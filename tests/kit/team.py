"""The ranks of one incarnation, all in this process, and the coordinator that they meet at."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from processes import descendants

from hydroslurm.coordination.client import CoordinatorClient
from hydroslurm.coordination.secret import Secret
from hydroslurm.coordination.world import LOOPBACK, World
from hydroslurm.core.events import EventKind
from hydroslurm.errors import AgreementFailed, CoordinatorLost
from hydroslurm.gate.protocol import Action, Cause, GateState, GateStatus

KEY = secrets.token_bytes(32)
SECRET = Secret("environment", KEY)


class OpenGate:
    """A gate that never closes: nothing here is about pausing."""

    def status(self) -> GateStatus:
        return GateStatus(state=GateState.RUNNING)

    def request(self, action: Action, causes: Cause) -> None:
        assert action is Action.RESUME, "somebody has paused this rank"


class Team:
    """The ranks of one incarnation, all in this process, each with its own connection."""

    def __init__(self, *, host: str = LOOPBACK) -> None:
        self.host = host
        self.incarnation_id = f"test {uuid.uuid4()}"
        self.ranks: list[CoordinatorClient] = []
        self.told: list[tuple[int, EventKind]] = []
        self.warned: list[str] = []

    def join(self, world_size: int, *ranks: int) -> list[CoordinatorClient]:
        """Some ranks of an incarnation of that size come, and are waited for when all are there."""
        new = [self._make(rank, world_size) for rank in ranks or range(world_size)]
        self.ranks += new
        for one in new:
            one.start()
        if len(self.ranks) == world_size:
            for one in self.ranks:
                assert one.wait_for_all(timeout_s=60)
        return new

    def _make(self, rank: int, world_size: int) -> CoordinatorClient:
        return CoordinatorClient(
            World(
                rank=rank,
                world_size=world_size,
                local_rank=rank,
                host=self.host,
                incarnation_id=self.incarnation_id,
            ),
            OpenGate(),  # type: ignore[arg-type]
            secret=lambda: SECRET,
            emit=lambda kind, _: self.told.append((rank, kind)),
            on_stop=lambda *_: None,
            warn=self.warned.append,
        )


def all_at_once(*calls: Callable[[], Any]) -> list[Any]:
    """The results, or the errors."""

    def result(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (AgreementFailed, CoordinatorLost) as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(result, calls))


def coordinator_of(pid: int) -> int | None:
    """The coordinator that rank 0, ``pid``, has started; None where there is none."""
    return next(filter(_is_coordinator, descendants(pid)), None)


def _is_coordinator(pid: int) -> bool:
    with suppress(OSError):
        return b"coordination.coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def coordinator_at(port: int) -> int:
    """The coordinator that listens at a port."""
    (pid,) = coordinators_at(port)
    return pid


def coordinators_at(port: int) -> list[int]:
    """All coordinators of this machine that listen at a port."""
    listed = Path("/proc/net/tcp").read_text().splitlines()[1:]
    sockets = {
        f"socket:[{fields[9]}]"
        for fields in map(str.split, listed)
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        pid = int(process.name)
        with suppress(OSError):
            if _is_coordinator(pid) and any(
                str(fd.readlink()) in sockets for fd in (process / "fd").iterdir()
            ):
                found.append(pid)
    return found
