"""The configuration files of a dev cluster, each made by one pure function, and its TCP ports.

Facts about Slurm here were seen on Slurm 22.05.8.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.devcluster.spec import LOOPBACK, ClusterSpec

CLUSTER_NAME = "hydroslurm-dev"
ACCOUNT = "dev"
CGROUPS = Path("/sys/fs/cgroup")
"""Where Slurm finds the cgroup v1 controllers, one folder each."""

WARNING = (
    "FOR TRYING AND TESTING ONLY, NOT FOR PRODUCTION: a private Slurm of hydroslurm's, "
    "on the loopback interface of one machine"
)


@dataclass(frozen=True)
class Ports:
    """The TCP ports of one cluster, all on the loopback interface.

    Attributes:
        sockets: bound to the ports to reserve them. They never listen, and have SO_REUSEADDR set,
            as Slurm's daemons' sockets have. So a daemon can bind and listen on its port while it
            is still reserved; at no moment can another program or cluster take it.
    """

    slurmctld: int
    slurmdbd: int
    slurmd: tuple[int, ...]
    sockets: tuple[socket.socket, ...] = ()

    @classmethod
    def reserve(cls, nodes: int) -> Ports:
        """Reserve the ports of a cluster with this many nodes; the caller releases them."""
        sockets = tuple(socket.socket() for _ in range(nodes + 2))
        for bound in sockets:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((LOOPBACK, 0))
        slurmctld, slurmdbd, *slurmd = (bound.getsockname()[1] for bound in sockets)
        return cls(slurmctld, slurmdbd, tuple(slurmd), sockets)

    @property
    def all(self) -> tuple[int, ...]:
        return (self.slurmctld, self.slurmdbd, *self.slurmd)

    def release(self) -> None:
        for bound in self.sockets:
            bound.close()


@dataclass(frozen=True)
class Place:
    """A cluster's place and owner, as its configuration spells them.

    Attributes:
        base: short path of the cluster's folder, of harmless characters (Slurm's files cannot
            quote a blank, and a Unix socket's path is limited to 107 bytes).
        hostname: of this machine; it need not resolve.
        user: name of the user who owns all daemons and jobs.
        memory_mb: what each node claims.
        plugins: folder of Slurm's plugins; None leaves it to Slurm.
    """

    base: Path
    hostname: str
    user: str
    memory_mb: int
    plugins: Path | None = None

    @property
    def host(self) -> str:
        """The host as Slurm wants it: up to the first dot. A name that slurm.conf cannot hold
        becomes localhost, which Slurm replaces by its own choice."""
        short = self.hostname.split(".")[0]
        return short if re.fullmatch(r"[A-Za-z0-9_-]+", short) else "localhost"

    @property
    def munge_socket(self) -> Path:
        return self.base / "run/munge.sock"

    @property
    def plugins_link(self) -> Path:
        return self.base / "run/plugins"

    @property
    def plugin_dir(self) -> str:
        """The setting for slurm.conf and slurmdbd.conf, by a name without blanks."""
        return f"PluginDir={self.plugins_link}" if self.plugins else "# PluginDir: Slurm's own"


def slurm_conf(spec: ClusterSpec, place: Place, ports: Ports) -> str:
    """Return slurm.conf of a dev cluster."""
    base = place.base
    control_at, *nodes_at = spec.addresses
    nodes = "".join(
        f"NodeName={name} NodeHostname={name if spec.network else place.host} NodeAddr={address} "
        f"Port={port} CPUs={spec.cpus_per_node} RealMemory={place.memory_mb} State=UNKNOWN\n"
        for name, address, port in zip(spec.node_names, nodes_at, ports.slurmd, strict=True)
    )
    return f"""\
# {WARNING}.
# Made by `hydroslurm cluster up`; changes are lost at the next one.
ClusterName={CLUSTER_NAME}
SlurmctldHost={place.host}({control_at})
SlurmctldPort={ports.slurmctld}
SlurmUser={place.user}
SlurmdUser={place.user}
{place.plugin_dir}

# A requeued job may not start before its old credential has expired: 121 s by default, 6 s with the
# smallest cred_expire that Slurm takes.
{_auth(spec, place)},cred_expire=5
CredType=cred/{spec.auth}

StateSaveLocation={base}/state/slurmctld
SlurmdSpoolDir={base}/state/slurmd-%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
SlurmctldSyslogDebug=quiet
SlurmdSyslogDebug=quiet
MailProg=/bin/true
PlugStackConfig={base}/conf/plugstack.conf

{_tracking(spec)}
JobAcctGatherType=jobacct_gather/linux
SwitchType=switch/none
MpiDefault=none
# Nodes may claim more CPUs than the machine has.
SlurmdParameters=config_overrides
ReturnToService=2
KillWait={spec.kill_wait_s}
MessageTimeout=30
# A node is drained for good where a process outlives its SIGKILL by 60 s, as on a slow disk.
UnkillableStepTimeout=900

{_resources(spec, place)}
SchedulerType=sched/backfill
# Scheduler passes come 30 and 60 s apart by default.
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={control_at}
AccountingStoragePort={ports.slurmdbd}
{_accounting_pass(spec, place)}
{nodes}
{spec.partitions or _preemption(spec)}"""


def _auth(spec: ClusterSpec, place: Place) -> str:
    """Return the auth lines, up to a begun AuthInfo; auth/slurm has its key beside slurm.conf."""
    if spec.auth == "slurm":
        return "AuthType=auth/slurm\nAuthInfo=use_client_ids"
    return f"AuthType=auth/munge\nAuthInfo=socket={place.munge_socket}"


def _accounting_pass(spec: ClusterSpec, place: Place) -> str:
    if spec.auth == "slurm":
        return ""
    return f"""\
# The way to slurmdbd does not read AuthInfo: its munge socket is named by the "password".
AccountingStoragePass={place.munge_socket}
"""


def _tracking(spec: ClusterSpec) -> str:
    if spec.proctrack == "cgroup":
        return """\
# As in production. A suspended job step is frozen by its cgroup, and only the direct children of
# slurmstepd get its signals.
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup"""
    return """\
# No cgroups and no binding: they need root, and several nodes share this machine. With
# proctrack/linuxproc every process of a job step gets its signals; with proctrack/cgroup only the
# direct children of slurmstepd would.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none"""


def _resources(spec: ClusterSpec, place: Place) -> str:
    if spec.constrain_memory:
        return f"""\
# A job without --mem gets its CPUs' part of the node's memory, not all of it.
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={max(1, place.memory_mb // spec.cpus_per_node)}"""
    return """\
# CPUs only: with memory as a resource a job without --mem would take a whole node.
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU"""


def _preemption(spec: ClusterSpec) -> str:
    everywhere = f"Nodes={','.join(spec.node_names)} MaxTime=INFINITE DefaultTime=01:00:00 State=UP"
    if spec.profile == "pause":
        # Slurm requires OverSubscribe=FORCE:1 for gang scheduling between partitions without time
        # slices within one: two jobs of `low` queue up behind each other. GraceTime would be
        # ignored here. SIGSTOP follows SIGTSTP after 2 s: a constant in 22.05, which rejects a
        # slurm.conf with PreemptParameters=suspend_grace_time.
        return f"""\
# Seen: SIGTSTP 10 ms after the urgent srun was submitted, SIGSTOP 2 s later, SIGCONT 5 ms after
# the urgent job had ended.
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PartitionName=low {everywhere} Default=YES PriorityTier=1 OverSubscribe=FORCE:1 PreemptMode=SUSPEND
PartitionName=urgent {everywhere} PriorityTier=10 OverSubscribe=FORCE:1 PreemptMode=OFF
"""
    if spec.profile == "gang-requeue":
        return f"""\
# Seen: GraceTime is ignored. SIGTERM and SIGCONT as soon as the urgent srun was submitted, both
# again within 10 ms, and SIGKILL after KillWait.
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PartitionName=low {everywhere} Default=YES PriorityTier=1 OverSubscribe=FORCE:1 \
PreemptMode=REQUEUE GraceTime={spec.grace_s}
PartitionName=urgent {everywhere} PriorityTier=10 OverSubscribe=FORCE:1 PreemptMode=OFF
"""
    return f"""\
# Seen with GraceTime=6: SIGTERM and SIGCONT 10 ms after the urgent srun was submitted, both again
# when slurmctld next looked at its time limits (it does every 30 s), and SIGKILL after KillWait.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low {everywhere} Default=YES PriorityTier=1 PreemptMode=REQUEUE \
GraceTime={spec.grace_s}
PartitionName=urgent {everywhere} PriorityTier=10 PreemptMode=OFF
"""


def slurmdbd_conf(spec: ClusterSpec, place: Place, ports: Ports) -> str:
    """Return slurmdbd.conf, which Slurm wants readable by its user alone.

    There is no password: the database listens on a Unix socket in a private folder. Slurm cannot
    name that socket; MariaDB's client library takes it from MYSQL_UNIX_PORT.
    """
    return f"""\
# {WARNING}.
{_auth(spec, place)}
DbdHost=localhost
DbdAddr={spec.addresses[0]}
DbdPort={ports.slurmdbd}
SlurmUser={place.user}
{place.plugin_dir}
PidFile={place.base}/run/slurmdbd.pid
LogFile={place.base}/log/slurmdbd.log
DebugLevel=info
DebugLevelSyslog=quiet
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser={place.user}
StorageLoc=slurm
"""


def cgroup_conf(spec: ClusterSpec, release: tuple[int, int]) -> str:
    """Return cgroup.conf: the machine's v1 controllers, or one that keeps slurmd off them.

    Even without any use of cgroups slurmd loads a plugin for them. Its own choice (autodetect)
    fails without a cgroup file system, as in many containers, and for an ordinary user who cannot
    ask systemd for a scope. The v1 plugin starts anywhere; ``disabled`` exists from 23.11 on.
    """
    if spec.proctrack == "cgroup":
        return f"""\
# {WARNING}.
CgroupPlugin=cgroup/v1
CgroupMountpoint={CGROUPS}
ConstrainCores=no
ConstrainDevices=no
ConstrainRAMSpace={"yes" if spec.constrain_memory else "no"}
"""
    plugin = "disabled" if release >= (23, 11) else "cgroup/v1"
    return f"""\
# {WARNING}.
CgroupPlugin={plugin}
"""


def plugstack_conf(plugin: Path | None, why_not: str = "") -> str:
    """Return plugstack.conf with the plugin for ``--preempt``, or with the reason why not."""
    if plugin is not None:
        line = f"optional {plugin}"
    else:
        line = "".join(f"# no --preempt: {part}\n" for part in why_not.splitlines()).rstrip("\n")
    return f"""\
# {WARNING}.
# SPANK plugins: more may be named here, and count from the next srun on.
{line}
"""


_LISTEN = "0A"
_LOOPBACK_HEX = ("0100007F", "00000000000000000000000001000000")


def listening(port: int) -> bool:
    """Whether something listens on a port; sends nothing to it."""
    return any(port == other for _, other in _listeners())


def open_to_others(ports: Iterable[int], own: str = LOOPBACK) -> list[int]:
    """Return those ports on which something listens beyond loopback and the address ``own``."""
    wanted, known = set(ports), (*_LOOPBACK_HEX, socket.inet_aton(own)[::-1].hex().upper())
    return sorted(
        {port for address, port in _listeners() if port in wanted and address not in known}
    )


def _listeners() -> Iterator[tuple[str, int]]:
    """Yield address (hexadecimal, as the kernel writes it) and port of each listening socket."""
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        lines = path.read_text().splitlines()[1:] if path.exists() else []
        for fields in (line.split() for line in lines):
            if fields[3] == _LISTEN:
                address, _, port = fields[1].partition(":")
                yield address, int(port, 16)
