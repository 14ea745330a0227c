"""Start the daemons of a cluster in the order that Slurm needs; stop on request."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hydroslurm.core.proc import die_with
from hydroslurm.devcluster import network
from hydroslurm.devcluster.config import (
    ACCOUNT,
    CLUSTER_NAME,
    Place,
    Ports,
    cgroup_conf,
    listening,
    open_to_others,
    plugstack_conf,
    slurm_conf,
    slurmdbd_conf,
)
from hydroslurm.devcluster.layout import CLUSTER_ENV, Layout
from hydroslurm.devcluster.processes import Daemon, ProcessId
from hydroslurm.devcluster.programs import Programs, system_tables_sql
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError, HydroslurmError
from hydroslurm.slurm.spank.build import PLUGIN, build_plugin, slurm_release

_LIMIT_S = 300.0
"""Upper bound on each wait."""

# Small and not durable: the database lives for minutes. It starts in 0.3 s instead of 3.
_MARIADB = (
    "--no-defaults",
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
    "--innodb-data-file-path=ibdata1:4M:autoextend",
    "--innodb-temp-data-file-path=ibtmp1:4M:autoextend",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
    "--skip-log-bin",
)


@dataclass
class Bringup:
    """Starts the daemons of one cluster; ``daemons`` holds those started so far.

    For the supervisor's main thread only.
    """

    spec: ClusterSpec
    layout: Layout
    place: Place
    ports: Ports
    programs: Programs
    control: Control
    daemons: list[Daemon] = field(default_factory=list)
    no_preempt: str = ""
    """Why srun has no ``--preempt`` here; empty if it has."""

    def run(self) -> None:
        """Start everything and wait until all nodes are idle.

        Raises:
            ClusterError: a daemon ended, or a program failed or took too long.
            StopRequested: the cluster has to end.
        """
        if self.spec.network:
            network.create(self.spec, self.place.host, self.layout.hosts)
        self._write_files()
        if self.spec.auth == "munge":
            self._start(
                "munged",
                ["-F", "--force", f"--key-file={self._base}/conf/munge.key"]
                + [f"--{name}={self._base}/run/munge.{end}" for name, end in _MUNGE_FILES],
            )
        loopback = self._compile_loopback()
        self._make_database()
        if self.spec.auth == "munge":
            self._wait("munged's socket", self.place.munge_socket.exists)
        self._finish(loopback)
        self._start_database()
        self._start("slurmdbd", ["-D"], LD_PRELOAD=str(self._loopback_so))
        self._make_plugin()
        self._wait("slurmdbd to listen", lambda: listening(self.ports.slurmdbd))
        self._register()
        # slurmctld after the registration: it looks its cluster up only once, at its start
        self._start("slurmctld", ["-D", "-c"], LD_PRELOAD=str(self._loopback_so))
        self._wait("slurmctld to listen", lambda: listening(self.ports.slurmctld))
        for number, name in enumerate(self.spec.node_names):
            preload, inside = str(self._loopback_so), list[str]()
            if self.spec.network:  # each address is the node's own
                preload, inside = "", network.enter(self.spec, number, self.layout.hosts)
            self._start(f"slurmd-{name}", self._slurmd(name), inside, LD_PRELOAD=preload)
        self._wait("all nodes to be idle", self._nodes_idle)
        self._check_loopback()

    @property
    def has_controller(self) -> bool:
        """Whether slurmctld is running, so that there may be jobs."""
        return any(d.name == "slurmctld" and d.process.poll() is None for d in self.daemons)

    @property
    def _base(self) -> Path:
        return self.place.base

    @property
    def _loopback_so(self) -> Path:
        return self._base / "run/loopback.so"

    def environ(self, **more: str) -> dict[str, str]:
        """Return the environment of our daemons and programs, without the caller's own Slurm."""
        return {
            "PATH": self.programs.path,
            "HOME": str(self.layout.root),
            "LC_ALL": "C.UTF-8",
            "SLURM_CONF": str(self._base / "conf/slurm.conf"),
            "MYSQL_UNIX_PORT": str(self._base / "run/mysql.sock"),
            "TMPDIR": str(self._base / "state/tmp"),
            CLUSTER_ENV: str(self.layout.root),
            **({"TZ": os.environ["TZ"]} if "TZ" in os.environ else {}),
            **more,
        }

    def _write_files(self) -> None:
        release = slurm_release(self.programs["sinfo"], self.environ())
        if self.spec.auth == "slurm" and release < (23, 11):
            raise ClusterError(
                "auth/slurm needs Slurm 23.11 or newer, and this is "
                f'{release[0]}.{release[1]:02d}; auth="munge" works with each release'
            )
        _write(self.layout.slurm_conf, slurm_conf(self.spec, self.place, self.ports))
        _write(self.layout.slurmdbd_conf, slurmdbd_conf(self.spec, self.place, self.ports))
        _write(self.layout.cgroup_conf, cgroup_conf(self.spec, release))
        _write(self.layout.key(self.spec.auth), os.urandom(128))
        for name in (
            "slurmctld",
            "mysql",
            "tmp",
            *(f"slurmd-{node}" for node in self.spec.node_names),
        ):
            (self.layout.state / name).mkdir(mode=0o700)
        if self.place.plugins is not None:
            self.place.plugins_link.symlink_to(self.place.plugins)

    def _slurmd(self, node: str) -> list[str]:
        if self.place.plugins is None:
            return ["-D", "-N", node]
        # a Slurm in a prefix of its own, whose slurmstepd is not at its compiled-in place
        return ["-D", "-N", node, "-d", str(self.place.plugins.parents[1] / "sbin/slurmstepd")]

    def _compile_loopback(self) -> Daemon:
        source = Path(__file__).with_name("loopback.c")
        argv = [self.programs.compiler, "-x", "c", "-O1", "-shared", "-fPIC"]
        argv.append(f'-DADDRESS="{self.spec.addresses[0]}"')
        return self._begin("compiler", [*argv, "-o", str(self._loopback_so), str(source), "-ldl"])

    def _make_plugin(self) -> None:
        """``srun --preempt``, if Slurm's headers are installed; the cluster works without it."""
        plugin = self._base / "run" / PLUGIN
        try:
            build_plugin(plugin, environ=self.environ(CC=self.programs.compiler))
            _write(self.layout.plugstack_conf, plugstack_conf(plugin))
        except HydroslurmError as error:
            self.no_preempt = str(error)
            _write(self.layout.plugstack_conf, plugstack_conf(None, self.no_preempt))

    def _make_database(self) -> None:
        """Create MariaDB's system tables, which slurmdbd's stored procedures need."""
        tables = system_tables_sql(self.programs["mariadbd"]).read_text()
        script = self.layout.state / "mysql.sql"
        script.write_text(f"create database mysql;\nuse mysql;\n{tables}")
        argv = [self.programs["mariadbd"], *self._mariadb(), "--bootstrap"]
        self._finish(self._begin("mariadbd-bootstrap", argv, stdin=script))

    def _start_database(self) -> None:
        # no network and no grant tables: the socket is in a folder of mode 0700, so only the user
        # who owns everything else here can reach it
        socket = self._base / "run/mysql.sock"
        self._start(
            "mariadbd",
            [
                *self._mariadb(),
                f"--socket={socket}",
                f"--pid-file={self._base}/run/mysql.pid",
                "--skip-networking",
                "--skip-grant-tables",
            ],
        )
        self._wait("mariadbd's socket", socket.exists)

    def _mariadb(self) -> list[str]:
        # the server otherwise refuses to run as root
        as_root = ["--user=root"] if os.geteuid() == 0 else []
        # a separate folder for temporary files: a starting server removes those of others
        private = [f"--datadir={self._base}/state/mysql", f"--tmpdir={self._base}/state/tmp"]
        return [*_MARIADB, *as_root, *private]

    def _register(self) -> None:
        """Register cluster, account and user in one go: each sacctmgr takes half a second.

        With `add`, because `load` refuses an unknown SlurmUser other than root.
        """
        script = self.layout.run / "sacctmgr.txt"
        script.write_text(
            f"add cluster {CLUSTER_NAME}\n"
            f"add account {ACCOUNT}\n"
            f"add user {self.place.user} account={ACCOUNT} adminlevel=admin\n"
        )
        self._finish(self._begin("sacctmgr", [self.programs["sacctmgr"], "-i"], stdin=script))

    def _nodes_idle(self) -> bool:
        argv = [self.programs["sinfo"], "-h", "-N", "-p", "low", "-o", "%T"]
        done = subprocess.run(
            argv, env=self.environ(), capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.split() == ["idle"] * self.spec.nodes

    def _check_loopback(self) -> None:
        exposed = open_to_others(self.ports.all, self.spec.addresses[0])
        if exposed:
            raise ClusterError(
                f"Slurm listens beyond the loopback interface on port {exposed[0]}, because "
                f"{self._loopback_so} could not be preloaded into it (is {self.layout.root} "
                "mounted noexec?). Choose another folder with --dir"
            )

    def _start(
        self, name: str, arguments: Sequence[str], inside: Sequence[str] = (), **more: str
    ) -> None:
        program = name.partition("-")[0]
        # Slurm's daemons write their own logs
        log = self.layout.console(name) if program.startswith("slurm") else None
        argv = [*inside, self.programs[program], *arguments]
        self.daemons.append(self._begin(name, argv, log=log, environ=self.environ(**more)))

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            for daemon in self.daemons:
                if (status := daemon.process.poll()) is not None:
                    how = f"exit status {status}" if status >= 0 else f"by signal {-status}"
                    raise ClusterError(
                        f"{daemon.name} ended while the cluster was starting, {how}. "
                        f"{daemon.tail_text()}"
                    )
            if time.monotonic() > deadline:
                tails = "\n".join(daemon.tail_text() for daemon in self.daemons)
                raise ClusterError(f"waited {_LIMIT_S:g} s for {what}.\n{tails}")
            self.control.wait(0.02)

    def _begin(
        self,
        name: str,
        argv: Sequence[str],
        *,
        stdin: Path | None = None,
        log: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Daemon:
        """Start a program that dies with this process: the kernel ties its life to the thread that
        forked it."""
        log = log or self.layout.log(name)
        with log.open("ab") as output, (stdin or Path(os.devnull)).open("rb") as source:
            process = subprocess.Popen(
                argv,
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.layout.root,
                env=environ or self.environ(),
                preexec_fn=partial(_begin_child, os.getpid()),
                start_new_session=True,
            )
        return Daemon(name, process, log)

    def _finish(self, program: Daemon) -> None:
        """Wait for a program to end successfully."""
        self._wait(f"{program.name} to end", lambda: program.process.poll() is not None)
        if program.process.returncode != 0:
            raise ClusterError(
                f"{program.name} failed with exit status {program.process.returncode}. "
                f"{program.tail_text()}"
            )


_MUNGE_FILES = (("socket", "sock"), ("pid-file", "pid"), ("seed-file", "seed"))


def _write(path: Path, content: str | bytes) -> None:
    """Write a file that only its owner can read."""
    data = content.encode() if isinstance(content, str) else content
    path.touch(mode=0o600)
    path.write_bytes(data)


_ENDING = (signal.SIGTERM, signal.SIGINT)
_AWAITED = (*_ENDING, signal.SIGCHLD)


class StopRequested(Exception):
    """The cluster has to end: its caller is gone, or it got a signal."""


class Control:
    """Watches the caller, and signals to this process, which are blocked but for :meth:`wait`.

    Attributes:
        caller: the cluster ends with this process; None: it stays.
    """

    def __init__(self, caller: ProcessId | None) -> None:
        self.caller = caller
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)

    def wait(self, limit_s: float) -> None:
        """Sleep for ``limit_s``, or until a child ends.

        Raises:
            StopRequested: the cluster has to end.
        """
        received = signal.sigtimedwait(_AWAITED, limit_s)
        if received is not None and received.si_signo in _ENDING:
            raise StopRequested("asked to end")
        if self.caller is not None and not self.caller.alive:
            raise StopRequested("the caller is gone")


def _begin_child(parent: int) -> None:
    """In the child: die with ``parent``, and get the signals that it has blocked."""
    die_with(parent)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
