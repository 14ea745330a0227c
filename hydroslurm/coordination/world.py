"""Which rank of how many this process is, and how it finds its peers.

torchrun's variables take precedence over Slurm's: its workers run below one Slurm task, and have
ranks of their own. A process of neither is rank 0 of 1.
"""

from __future__ import annotations

import contextlib
import hmac
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hydroslurm.errors import UsageError
from hydroslurm.slurm.allocation import Allocation

FIRST_PORT = 20000
PORTS = 6000
"""Of torch's rendezvous, from FIRST_PORT on; the coordinator's follow. All are below 32768, where
Linux begins to assign ephemeral ports."""
COORDINATOR_PORT_TRIES = 16
"""Ports that the first rank tries for the coordinator, and that the others look at."""
LOOPBACK = "127.0.0.1"
INCARNATION_ENV = "HYDROSLURM_INCARNATION"
"""Set by ``hydroslurm agent`` for its workers: the same on all nodes, new after a restart."""
KEY_ENV = "HYDROSLURM_STEP_KEY"
"""The key of a job step's ranks, KEY_DIGITS hexadecimal digits; see ``coordination/secret.py``."""
KEY_DIGITS = 64


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks that train together, as one of them sees them.

    Attributes:
        rank, world_size: among all of them.
        local_rank, local_world_size: among those of this node.
        host: where rank 0 is: ``MASTER_ADDR`` where that is set, loopback on a single node, else
            the first node of the job step.
        incarnation_id: the fencing token: the same for the ranks of one start of one job step, and
            for no others. Made of job, job step and how often it was restarted, or of what torchrun
            has in their place.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    host: str = LOOPBACK
    incarnation_id: str = ""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> World:
        """Read ``RANK``, ``WORLD_SIZE`` ... or SLURM_*.

        Raises:
            UsageError: a value that neither torchrun nor Slurm gives.
        """
        allocation = Allocation.from_environ(environ)
        if environ.get("WORLD_SIZE") and environ.get("RANK"):
            return cls._of_torch(environ, allocation)
        if allocation is None or allocation.step_id is None:
            return cls()
        # srun's task 0 is on the first node of its list, whatever the distribution
        first_node = allocation.nodes[0] if len(allocation.nodes) > 1 else LOOPBACK
        return cls(
            rank=allocation.rank,
            world_size=allocation.world_size,
            local_rank=allocation.local_rank,
            local_world_size=_tasks_here(environ, allocation),
            host=environ.get("MASTER_ADDR") or first_node,
            incarnation_id=_slurm_incarnation(allocation),
        )

    @classmethod
    def _of_torch(cls, environ: Mapping[str, str], allocation: Allocation | None) -> World:
        rank, size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        if rank >= size:
            raise UsageError(
                f"RANK={rank} and WORLD_SIZE={size} contradict each other: ranks go from 0 to "
                f"{size - 1}. Was one of them set by hand?"
            )
        host = environ.get("MASTER_ADDR", LOOPBACK)
        return cls(
            rank=rank,
            world_size=size,
            local_rank=_number(environ, "LOCAL_RANK", default=rank),
            local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=size),
            host=host,
            incarnation_id=environ.get(INCARNATION_ENV)
            or _torch_incarnation(environ, host, allocation),
        )

    def torch_port(self, key: bytes | None) -> int:
        """For ``MASTER_PORT``: another one in each incarnation, so that no rank of the last is met.

        Args:
            key: the attempt's, without which the port cannot be predicted. None: it follows from
                what everybody can see.
        """
        return FIRST_PORT + _digest(self.incarnation_id, key) % PORTS

    def coordinator_ports(self, key: bytes | None) -> tuple[int, ...]:
        """Where the coordinator may listen, in the order in which it tries; ``key`` as above."""
        first = _digest(f"coordinator {self.incarnation_id}", key)
        return tuple(
            FIRST_PORT + PORTS + (first + 367 * n) % PORTS for n in range(COORDINATOR_PORT_TRIES)
        )


def key_from(environ: Mapping[str, str]) -> bytes | None:
    """The key of ``HYDROSLURM_STEP_KEY``; None where it is not set.

    Raises:
        UsageError: it is no key.
    """
    text = environ.get(KEY_ENV, "")
    if not text:
        return None
    with contextlib.suppress(ValueError):
        key = bytes.fromhex(text)
        if 2 * len(key) == KEY_DIGITS:
            return key
    raise UsageError(
        f"{KEY_ENV} has {len(text)} characters, and wants {KEY_DIGITS} hexadecimal digits, as "
        f"`openssl rand -hex {KEY_DIGITS // 2}` prints them. Unset it to have the ranks find "
        "another way"
    )


def set_torch_variables(environ: MutableMapping[str, str], world: World, key: bytes | None) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which
    ``init_process_group()`` reads; a value that exists is kept."""
    environ.setdefault("MASTER_ADDR", world.host)
    environ.setdefault("MASTER_PORT", str(world.torch_port(key)))
    environ.setdefault("RANK", str(world.rank))
    environ.setdefault("WORLD_SIZE", str(world.world_size))
    environ.setdefault("LOCAL_RANK", str(world.local_rank))
    environ.setdefault("LOCAL_WORLD_SIZE", str(world.local_world_size))


def _torch_incarnation(environ: Mapping[str, str], host: str, allocation: Allocation | None) -> str:
    """Each rendezvous of torchrun chooses another port; its count alone is not enough, for it
    is not raised on a node whose workers were restarted because of another node. Where the
    variables are those of set_torch_environment(), it is the id that they were derived from."""
    ours = allocation is not None and allocation.world_size == _number(environ, "WORLD_SIZE")
    if allocation is not None and ours and "TORCHELASTIC_RUN_ID" not in environ:
        return _slurm_incarnation(allocation)
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    start = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = "" if allocation is None else _slurm_incarnation(allocation)
    return f"torch {run} {host}:{environ.get('MASTER_PORT', '')} start {start} {job}".rstrip()


def _slurm_incarnation(allocation: Allocation) -> str:
    """The folder is part of it because every cluster counts job ids from 1, and two dev clusters on
    one machine would meet at the same port."""
    return (
        f"slurm {allocation.cluster_name} job {allocation.job_id} step {allocation.step_id} "
        f"restart {allocation.restart_count} {allocation.submit_dir}"
    )


def _tasks_here(environ: Mapping[str, str], allocation: Allocation) -> int:
    """The entry of this node in Slurm's ``2(x3),1``."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        count, _, times = item.partition("(x")
        if not count.isdecimal() or not (times.rstrip(")") or "1").isdecimal():
            raise UsageError(f"SLURM_TASKS_PER_NODE={text!r} is not a list such as 2(x3),1")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    if allocation.node_rank < len(counts):
        return counts[allocation.node_rank]
    return allocation.world_size if len(allocation.nodes) <= 1 else 1


def _number(environ: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    value = environ.get(name, "")
    if not value and default is not None:
        return default
    if not (value.isascii() and value.isdecimal()):
        raise UsageError(
            f"{name}={value!r} is not a number of 0 or more, as torchrun sets it. Unset RANK and "
            "WORLD_SIZE to have Slurm's variables read"
        )
    return int(value)


def _digest(text: str, key: bytes | None) -> int:
    if key is None:
        return zlib.crc32(text.encode())
    return int.from_bytes(hmac.digest(key, f"port {text}".encode(), "sha256")[:8], "big")
