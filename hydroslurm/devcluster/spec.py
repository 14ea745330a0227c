"""The specification of a dev cluster."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Literal, get_args

from hydroslurm.errors import UsageError

Profile = Literal["pause", "requeue", "gang-requeue"]
PROFILES: tuple[Profile, ...] = get_args(Profile)
Proctrack = Literal["linuxproc", "cgroup"]
PROCTRACKS: tuple[Proctrack, ...] = get_args(Proctrack)
Auth = Literal["munge", "slurm"]
AUTHS: tuple[Auth, ...] = get_args(Auth)
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class ClusterSpec:
    """The specification of a dev cluster, validated on construction.

    Attributes:
        nodes: slurmd daemons; ``node_names`` has their names.
        cpus_per_node: CPUs that each node claims, however many the machine has.
        profile: what happens to a job of partition ``low`` when one of ``urgent`` needs its place:
            ``pause`` (PreemptMode=SUSPEND,GANG), ``requeue`` (PreemptMode=REQUEUE), or
            ``gang-requeue`` (gang scheduling cluster-wide, and REQUEUE for ``low``).
        directory: the cluster's folder; None: a temporary one, removed at the end.
        grace_s: GraceTime of ``low``. Only profile ``requeue`` honours it; with ``gang-requeue``
            Slurm ignores it. A lower bound: Slurm checks it every 30 s.
        kill_wait_s: KillWait, from SIGTERM to SIGKILL; slurmd waits at least 5 s.
        partitions: lines of slurm.conf that replace the profile's preemption and partitions, to
            try another cluster's settings; one partition must be ``low``.
        proctrack: how Slurm tracks a job step's processes: ``linuxproc`` (works for all users) or
            ``cgroup`` (as in production; needs root and cgroup v1 controllers).
        constrain_memory: with ``cgroup`` only: jobs request memory (``--mem``), and the kernel
            kills those that use more.
        auth: how daemons and programs authenticate: ``munge``, or ``slurm`` (AuthType=auth/slurm,
            from Slurm 23.11 on), without munged.
        network: give each node a network namespace, address and host name; needs root.

    Raises:
        UsageError: a value is out of its range, which the message names.
    """

    nodes: int = 4
    cpus_per_node: int = 4
    profile: Profile = "pause"
    directory: Path | None = None
    grace_s: int = 5
    kill_wait_s: int = 30
    partitions: str = ""
    proctrack: Proctrack = "linuxproc"
    constrain_memory: bool = False
    auth: Auth = "munge"
    network: bool = False

    def __post_init__(self) -> None:
        _one_of("profile", self.profile, PROFILES)
        _one_of("proctrack", self.proctrack, PROCTRACKS)
        _one_of("auth", self.auth, AUTHS)
        if self.constrain_memory and self.proctrack != "cgroup":
            raise UsageError(
                f"constrain_memory needs cgroups, and proctrack is {self.proctrack!r}; "
                'set proctrack to "cgroup" as well'
            )
        _in_range("nodes", self.nodes, 1, 64)
        _in_range("cpus_per_node", self.cpus_per_node, 1, 1024)
        _in_range("grace_s", self.grace_s, 0, 3600)
        _in_range("kill_wait_s", self.kill_wait_s, 1, 3600)

    @property
    def node_names(self) -> tuple[str, ...]:
        """n1, n2 ...; with ``cgroup`` no two clusters of a machine share a name.

        slurmd keeps its jobs' processes in ``<controller>/slurm_<node>``, which all daemons of the
        machine share: two nodes of one name would end each other's jobs. 22.05 has no setting for
        that path, so the name itself must differ.
        """
        prefix = "n"
        if self.proctrack == "cgroup":
            prefix = f"n{self._hash & 0xFFFFFF:06x}-"
        return tuple(f"{prefix}{number}" for number in range(1, self.nodes + 1))

    @property
    def bridge(self) -> str:
        """Name of the nodes' bridge, unique to the folder."""
        return f"hs{self._hash:08x}"

    @property
    def cables(self) -> tuple[str, ...]:
        """Names of the host's interface to each node, and of the node's namespace."""
        return tuple(f"{self.bridge}-{number}" for number in range(1, self.nodes + 1))

    @property
    def subnet(self) -> IPv4Network:
        """Of the nodes, in 240.0.0.0/4, which is reserved and routed nowhere (RFC 1112)."""
        return IPv4Network(((0xF00000 | self._hash & 0xFFFFF) << 8, 24))

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where slurmctld and slurmdbd listen, then that of each node."""
        own = map(str, self.subnet.hosts()) if self.network else itertools.repeat(LOOPBACK)
        return tuple(itertools.islice(own, 1 + self.nodes))

    @property
    def _hash(self) -> int:
        return zlib.crc32(str(self.directory).encode(errors="surrogateescape"))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} is {value!r}; it must be one of {', '.join(known)}")


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} is {value!r}; it must be a whole number from {low} to {high}")
