"""The dev clusters of one run of the tests. Without Slurm their tests are skipped, or fail with
``HYDROSLURM_REQUIRE_SLURM=1`` in the environment.

Two clusters serve nearly all tests, and the workers of pytest-xdist, up to three, use the same
ones. A test gets a :class:`Part`: nodes of a cluster, on which no other worker's jobs run. Slurm
itself keeps them apart, by a feature of the nodes that all jobs of a part ask for. A test that
breaks a cluster, or counts what is asked of it, starts its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

import pytest
from processes import patience

from hydroslurm.devcluster import ClusterSpec, DevCluster, cgroups
from hydroslurm.devcluster.programs import missing, missing_message, search_path
from hydroslurm.errors import ClusterError

REQUIRE_ENV = "HYDROSLURM_REQUIRE_SLURM"
WORKERS = 3
"""As many have their own nodes in a cluster; a fourth one begins the next cluster."""

# A part has jobs of `low` or of `gang`: with gang scheduling, two partitions of one tier would take
# turns on a node.
GANG = """\
PreemptType=preempt/partition_prio
PreemptMode=SUSPEND,GANG
PartitionName=DEFAULT MaxTime=INFINITE DefaultTime=01:00:00 State=UP OverSubscribe=FORCE:1
PartitionName=low Nodes=n[1-12] Default=YES PriorityTier=1 PreemptMode=SUSPEND
PartitionName=gang Nodes=n[10-12] PriorityTier=1 PreemptMode=REQUEUE GraceTime=5
PartitionName=urgent Nodes=n[1-12] PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Shared:
    """A cluster that several workers use.

    Attributes:
        parts: name of a part -> its nodes; ``NAME-0`` to ``NAME-2`` are for one worker each.
    """

    name: str
    spec: ClusterSpec
    parts: Mapping[str, tuple[str, ...]]


def _nodes(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"n{number}" for number in range(first, last + 1))


PAUSE = Shared(
    "pause",
    ClusterSpec(nodes=12, kill_wait_s=5, partitions=GANG),
    {
        **{f"low-{worker}": _nodes(3 * worker + 1, 3 * worker + 3) for worker in range(WORKERS)},
        **{f"gang-{worker}": _nodes(10 + worker, 10 + worker) for worker in range(WORKERS)},
    },
)
REQUEUE = Shared(
    "requeue",
    ClusterSpec(nodes=26, cpus_per_node=8, profile="requeue", kill_wait_s=10),
    {
        **{f"low-{worker}": _nodes(2 * worker + 1, 2 * worker + 2) for worker in range(WORKERS)},
        "ranks": _nodes(7, 19),
        "jobs": _nodes(20, 26),
    },
)
CGROUP = ClusterSpec(
    nodes=1, profile="requeue", kill_wait_s=30, proctrack="cgroup", constrain_memory=True
)


class Part(DevCluster):
    """Some nodes of a cluster. Jobs that are submitted through it run on no others.

    Attributes:
        nodes: their names.
        defaults: what sbatch, salloc and srun take for options that are not given.
    """

    nodes: tuple[str, ...]
    defaults: Mapping[str, str]

    @classmethod
    def of(cls, cluster: DevCluster, nodes: tuple[str, ...], options: Mapping[str, str]) -> Part:
        """``options``: long names of sbatch, ``constraint`` and others."""
        part = cls.attach(cluster.directory)
        part.no_preempt = cluster.no_preempt
        part.nodes = nodes
        part.defaults = {
            f"{program}_{name.upper()}": value
            for program in ("SBATCH", "SALLOC", "SLURM")
            for name, value in options.items()
        }
        return part

    def environ(self) -> dict[str, str]:
        return {**super().environ(), **self.defaults}


@dataclass
class _Used:
    """A shared cluster that this worker uses; ``started`` by it, or by another one."""

    users: IO[str]
    cluster: DevCluster
    started: bool


@dataclass
class SharedClusters:
    """Those of one run of the tests, started by the worker that first needs one.

    A file lock tells who uses a cluster: whoever has started it ends it after all others have let
    go. The cluster of a worker that dies ends with it.
    """

    folder: Path
    worker: int
    _used: dict[str, _Used] = field(default_factory=dict)

    def part(self, shared: Shared, name: str, **options: str) -> Part:
        """The nodes of that name; ``NAME-*`` are those of this worker."""
        if name.endswith("-*"):
            name = f"{name[:-1]}{self.worker % WORKERS}"
        if shared.name not in self._used:
            require_slurm()
            self._used[shared.name] = self._use(shared)
        cluster = self._used[shared.name].cluster
        return Part.of(cluster, shared.parts[name], {"constraint": name, **options})

    def _use(self, shared: Shared) -> _Used:
        stem = f"{shared.name}-{self.worker // WORKERS}"
        users = (self.folder / f"{stem}.users").open("a")
        fcntl.flock(users, fcntl.LOCK_SH)
        place = self.folder / f"{stem}.cluster"
        with (self.folder / f"{stem}.lock").open("a") as one_at_a_time:
            fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
            try:
                return _Used(users, DevCluster.attach(Path(place.read_text())), started=False)
            except (FileNotFoundError, ClusterError):
                cluster = DevCluster.up(shared.spec)
            for name, nodes in shared.parts.items():
                features = (f"AvailableFeatures={name}", f"ActiveFeatures={name}")
                which = f"NodeName={','.join(nodes)}"
                cluster.run(["scontrol", "update", which, *features])
            place.write_text(str(cluster.directory))
            return _Used(users, cluster, started=True)

    def show(self) -> Iterator[tuple[str, str]]:
        """Name of each cluster that this worker uses, and its nodes that are not idle and jobs."""
        nodes = ["sinfo", "-ho", "%N %T %E", "-t", "alloc,comp,down,drain,fail,mix,no_respond"]
        jobs = ["squeue", "-aho", "%i %P %j %T %M %N %r"]
        for name, used in self._used.items():
            try:
                dead = [one.name for one in used.cluster.status().daemons if not one.alive]
                done = [used.cluster.run(command, check=False) for command in (nodes, jobs)]
            except ClusterError as error:
                yield name, str(error)
            else:
                shown = "\n".join(one.stdout + one.stderr for one in done)
                yield name, f"ended daemons: {dead}\n{shown}" + _stuck(used.cluster)

    def cancel(self, *, since: float) -> None:
        """End the jobs on this worker's own nodes that were submitted since then (epoch, s)."""
        mine = re.compile(rf"\w+-{self.worker % WORKERS}")
        for used in self._used.values():
            asked = used.cluster.run(["squeue", "-aho", "%A %V %f"], check=False).stdout
            rows = [line.split() for line in asked.splitlines()]
            later = [
                job
                for job, submitted, feature in rows
                if mine.fullmatch(feature)
                and datetime.fromisoformat(submitted).timestamp() >= int(since)
            ]
            if later:
                used.cluster.run(["scancel", "--full", "--signal=KILL", *later], check=False)
                used.cluster.run(["scancel", *later], check=False)

    def end(self) -> None:
        """Let go of all."""
        for used in self._used.values():
            if not used.started:
                used.users.close()
        for used in self._used.values():
            if used.started:
                fcntl.flock(used.users, fcntl.LOCK_EX)  # once nobody else uses it
                used.cluster.down()
                used.users.close()
        self._used.clear()


_SHARED = pytest.StashKey[SharedClusters]()


@pytest.fixture(scope="session")
def shared_clusters(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> SharedClusters:
    """They outlast this fixture: a test's time limit is none for the other worker."""
    base, worker = tmp_path_factory.getbasetemp(), os.environ.get("PYTEST_XDIST_WORKER")
    folder, number = (base, 0) if worker is None else (base.parent, int(worker.lstrip("gw")))
    return request.config.stash.setdefault(_SHARED, SharedClusters(folder, number))


def pytest_unconfigure(config: pytest.Config) -> None:
    if (shared := config.stash.get(_SHARED, None)) is not None:
        shared.end()


def _stuck(cluster: DevCluster) -> str:
    """What the nodes of jobs that do not end say, and which processes of these jobs live."""
    rows = cluster.run(["squeue", "-aho", "%A %N", "-t", "COMPLETING"], check=False).stdout.split(
        "\n"
    )
    told = []
    for job, node in (row.split() for row in rows if row):
        log = cluster.directory / f"log/slurmd-{node}.log"
        told += [f"job {job} does not end", *log.read_text(errors="replace").splitlines()[-20:]]
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                command = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                is_step = command.startswith(f"slurmstepd: [{job}.")
                if (
                    is_step
                    or f"SLURM_JOB_ID={job}\0".encode() in (stat.parent / "environ").read_bytes()
                ):
                    waits = (stat.parent / "wchan").read_text()
                    told.append(f"{stat.read_text()[:60]} in {waits}: {command[:200]}")
    return "\n".join(told)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    """A failure shows the nodes and the jobs of the clusters, and a test that submits jobs itself
    leaves none behind: one stuck node would fail many tests."""
    report = yield
    shared = item.config.stash.get(_SHARED, None)
    if report.failed and shared is not None and item.get_closest_marker("slurm"):
        report.sections += [(f"cluster {name}", shown) for name, shown in shared.show()]
        if any(isinstance(value, Part) for value in getattr(item, "funcargs", {}).values()):
            with contextlib.suppress(ClusterError):
                shared.cancel(since=call.start)
    return report


@pytest.fixture(scope="session")
def pause_cluster(shared_clusters: SharedClusters) -> Part:
    """Three nodes whose ``low`` jobs are suspended by ``urgent`` ones."""
    return shared_clusters.part(PAUSE, "low-*")


@pytest.fixture(scope="session")
def gang_requeue_cluster(shared_clusters: SharedClusters) -> Part:
    """A node whose jobs, by default of ``gang``, are requeued by gang scheduling, without grace."""
    return shared_clusters.part(PAUSE, "gang-*", partition="gang")


@pytest.fixture(scope="session")
def requeue_cluster(shared_clusters: SharedClusters) -> Part:
    """Two nodes whose ``low`` jobs are requeued by ``urgent`` ones."""
    return shared_clusters.part(REQUEUE, "low-*")


@pytest.fixture(scope="session")
def ranks_cluster(shared_clusters: SharedClusters) -> Part:
    """Thirteen nodes of the same kind, for several jobs of several nodes side by side."""
    return shared_clusters.part(REQUEUE, "ranks")


@pytest.fixture(scope="session")
def jobs_cluster(shared_clusters: SharedClusters) -> Part:
    """Seven nodes of the same kind, for many small jobs side by side."""
    return shared_clusters.part(REQUEUE, "jobs")


@pytest.fixture(scope="session")
def cgroup_cluster() -> Iterator[DevCluster]:
    """A cluster of one node with ``proctrack/cgroup`` and memory that is counted, whose ``low``
    jobs are requeued by ``urgent`` ones."""
    require_cgroups(CGROUP)
    with DevCluster.up(CGROUP) as cluster:
        yield cluster


def preempt(cluster: DevCluster, nodes: Sequence[str]) -> None:
    """Take these nodes for an urgent job, and wait for its end."""
    urgent = ("--partition=urgent", "--exclusive", "--time=1", f"--nodes={len(nodes)}")
    command = ["srun", *urgent, f"--nodelist={','.join(nodes)}", "true"]
    cluster.run(command, timeout_s=patience(240))


def require_slurm() -> None:
    """Skip the test, or fail it, unless everything that a dev cluster needs is installed."""
    absent = missing(search_path(os.environ.get("PATH")))
    if not absent:
        return
    message = f"a real Slurm is needed; {missing_message(absent)}"
    if os.environ.get(REQUIRE_ENV) == "1":
        pytest.fail(f"{message} ({REQUIRE_ENV}=1 makes this a failure)", pytrace=False)
    pytest.skip(message)


def require_cgroups(spec: ClusterSpec) -> None:
    """Skip the test where this user or this machine can have no such cluster: nothing that could be
    installed would help."""
    require_slurm()
    try:
        cgroups.require(spec)
    except ClusterError as error:
        pytest.skip(str(error))


def require_network() -> None:
    """Skip the test where this user cannot give nodes a network of their own."""
    require_slurm()
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a network of the nodes' own needs root and iproute2")
