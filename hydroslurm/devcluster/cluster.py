"""Start, use and end a dev cluster."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from hydroslurm.devcluster import cgroups
from hydroslurm.devcluster.layout import Layout, locked
from hydroslurm.devcluster.processes import ProcessId, Request, Running, sweep, tail, to_json
from hydroslurm.devcluster.programs import find_programs, search_path
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError

_DOWN_LIMIT_S = 40.0
# variables of another Slurm, or of a job in it, that would affect our programs
_FOREIGN = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SINFO_", "SACCT_")


@dataclass(frozen=True)
class DaemonStatus:
    """A daemon of a cluster."""

    name: str
    pid: int
    alive: bool


@dataclass(frozen=True)
class NodeStatus:
    """A node and its state in slurmctld: ``idle``, ``mixed``, ``allocated``, ``down*`` ..."""

    name: str
    state: str


@dataclass(frozen=True)
class ClusterStatus:
    """The current state of a cluster. ``nodes`` is empty if slurmctld does not answer."""

    directory: Path
    profile: str
    daemons: tuple[DaemonStatus, ...]
    nodes: tuple[NodeStatus, ...]


class DevCluster:
    """A running private Slurm. **For experiments and tests only.**

    As a context manager it ends with the block. A cluster started by :meth:`up` also ends with this
    process, even if that is killed, unless ``detach`` was set.
    """

    def __init__(
        self, layout: Layout, running: Running, supervisor: subprocess.Popen[bytes] | None = None
    ) -> None:
        """Internal: use :meth:`up` or :meth:`attach`."""
        self.spec = running.spec
        self.no_preempt = running.no_preempt
        self._layout = layout
        self._running = running
        self._supervisor = supervisor  # a child of this process

    @classmethod
    def up(
        cls, spec: ClusterSpec | None = None, *, detach: bool = False, timeout_s: float = 120.0
    ) -> DevCluster:
        """Start a cluster and wait until all its nodes are idle, which takes about 3 s.

        Args:
            spec: default: four nodes, profile ``pause``, in a temporary folder.
            detach: keep it running after this process has ended, until :meth:`down`.

        Raises:
            ClusterError: a program is missing, a cluster is already up in that folder, or a daemon
                did not start; the message has its last log lines. Nothing is left running.
        """
        spec = spec or ClusterSpec()
        find_programs(search_path(os.environ.get("PATH")))
        temporary = spec.directory is None
        directory = spec.directory or Path(tempfile.mkdtemp(prefix="hydroslurm-cluster-"))
        layout = Layout.at(directory)
        spec = replace(spec, directory=layout.root)
        cgroups.require(spec)
        layout.create()
        caller = ProcessId.of(os.getpid())
        assert caller is not None
        supervisor = _start_supervisor(layout, Request(spec, detach, temporary, caller))
        try:
            _wait_until_up(supervisor, layout, timeout_s=timeout_s)
            running = Running.read(layout)
            if running is None:
                raise ClusterError(
                    f"{layout.cluster_json} is gone: the cluster was ended meanwhile"
                )
            if detach:
                supervisor.wait()
        except BaseException:
            _abandon(supervisor)
            if temporary:
                layout.remove_all()
            raise
        assert supervisor.stdout is not None
        supervisor.stdout.close()
        return cls(layout, running, None if detach else supervisor)

    @classmethod
    def attach(cls, directory: Path) -> DevCluster:
        """Connect to a running cluster.

        Raises:
            ClusterError: none is running in that folder.
        """
        layout = Layout.at(directory)
        running = Running.read(layout)
        if running is None or not running.daemons or not running.supervisor.alive:
            raise ClusterError(
                f"no cluster is up in {layout.root}; start one: "
                f"hydroslurm cluster up --dir {layout.root}"
            )
        return cls(layout, running)

    @property
    def directory(self) -> Path:
        return self._layout.root

    @property
    def slurm_conf(self) -> Path:
        return self._layout.slurm_conf

    def environ(self) -> dict[str, str]:
        """Return the environment variables that point Slurm's programs to this cluster."""
        return {
            "SLURM_CONF": str(self.slurm_conf),
            "PATH": search_path(os.environ.get("PATH")),
        }

    def child_environ(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return a complete environment for a child: ``base`` (default: this process's), pointed to
        this cluster, without the variables of another Slurm or of a job in it."""
        given = os.environ if base is None else base
        kept = {name: value for name, value in given.items() if not name.startswith(_FOREIGN)}
        return {**kept, **self.environ()}

    def run(
        self, argv: Sequence[str], *, timeout_s: float = 60.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a program, usually one of Slurm's, on this cluster; its output is text.

        Raises:
            ClusterError: it took longer than ``timeout_s`` and was killed, or does not exist; with
                ``check``, also if it failed, with its stderr in the message.
        """
        words = " ".join(argv)
        try:
            done = subprocess.run(
                list(argv),
                env=self.child_environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"`{words}` took longer than {timeout_s:g} s") from error
        except OSError as error:
            raise ClusterError(f"`{words}` could not be run: {error.strerror}") from error
        if check and done.returncode != 0:
            raise ClusterError(
                f"`{words}` ended with exit status {done.returncode}: {done.stderr.strip()}"
            )
        return done

    def status(self) -> ClusterStatus:
        """Check the daemons and ask slurmctld for the nodes."""
        daemons = tuple(
            DaemonStatus(name, process.pid, process.alive)
            for name, process in self._running.daemons
        )
        listed = self.run(["sinfo", "-h", "-N", "-p", "low", "-o", "%N %T"], check=False)
        nodes = tuple(NodeStatus(*line.split(None, 1)) for line in listed.stdout.splitlines())
        return ClusterStatus(self.directory, self.spec.profile, daemons, nodes)

    def down(self, *, timeout_s: float = _DOWN_LIMIT_S) -> None:
        """Cancel the jobs, end all processes and remove everything but the logs. Idempotent.

        Raises:
            ClusterError: the supervisor is still running after ``timeout_s``.
        """
        self._running.supervisor.send(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        while self._running.supervisor.alive:
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the cluster in {self.directory} did not end in {timeout_s:g} s; its "
                    f"supervisor is process {self._running.supervisor.pid}, its log "
                    f"{self._layout.log('supervisor')}"
                )
            time.sleep(0.01)
        if self._supervisor is not None:
            self._supervisor.wait()
            self._supervisor = None
        _remove_leftovers(self._layout)

    def __enter__(self) -> DevCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.down()


def end_cluster(directory: Path) -> bool:
    """End the cluster in a folder, or clean up after a killed supervisor; False if there was none.

    Raises:
        ClusterError: it did not end.
    """
    layout = Layout.at(directory)
    running = Running.read(layout)
    if running is None:
        return False
    DevCluster(layout, running).down()
    return True


def _remove_leftovers(layout: Layout) -> None:
    """End and remove what a killed supervisor left; others leave nothing."""
    running = Running.read(layout)
    if running is not None and not running.supervisor.alive:
        with locked(layout):
            sweep(layout, running)


def _start_supervisor(layout: Layout, request: Request) -> subprocess.Popen[bytes]:
    package_parent = Path(__file__).resolve().parents[2]
    python_path = [str(package_parent), os.environ.get("PYTHONPATH", "")]
    with layout.log("supervisor").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "hydroslurm.devcluster.supervisor", to_json(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=layout.root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, python_path))},
            start_new_session=True,  # Ctrl-C goes to the caller only; the cluster ends with it
        )


def _wait_until_up(
    supervisor: subprocess.Popen[bytes], layout: Layout, *, timeout_s: float
) -> None:
    """Wait for the supervisor's answer, or raise the error that it tells."""
    assert supervisor.stdout is not None
    poll = select.poll()  # select() rejects descriptors above 1023
    poll.register(supervisor.stdout, select.POLLIN)
    if not poll.poll(timeout_s * 1000):
        raise ClusterError(f"the cluster was not up after {timeout_s:g} s; see {layout.logs}")
    answer = supervisor.stdout.readline()
    if not answer:
        lines = "".join(f"  {line}\n" for line in tail(layout.log("supervisor")))
        raise ClusterError(f"the cluster's supervisor ended. Its last lines:\n{lines}")
    if "error" in (response := json.loads(answer)):
        raise ClusterError(response["error"])


def _abandon(supervisor: subprocess.Popen[bytes]) -> None:
    """Make the supervisor end everything, and wait until its end closes the pipe."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(supervisor.pid, signal.SIGTERM)  # a detached one is in its group
    with contextlib.suppress(subprocess.TimeoutExpired):
        supervisor.communicate(timeout=_DOWN_LIMIT_S)
