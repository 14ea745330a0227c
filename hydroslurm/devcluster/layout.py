"""The only place that spells a path of a dev cluster, and that makes and removes its files.

    <folder>/
      THIS-IS-FOR-TESTING-ONLY  says what the folder is; without it nothing is ever removed
      lock                      held by the supervisor for as long as the cluster lives
      cluster.json              what runs, while it runs
      conf/  state/  run/       configuration and key, what the daemons keep, sockets and pid files
      log/                      one file per daemon; stays after the end

Beside it, while it is up, one private folder with a short name in the system's temporary folder.
It holds a link to the cluster's folder, through which the daemons see everything: so Unix sockets
stay below their 107 bytes, and slurm.conf never meets a blank, however deep and odd the folder's
own name is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydroslurm.core.rundir import Below
from hydroslurm.core.trust import check_trusted, is_trusted
from hydroslurm.devcluster.config import WARNING
from hydroslurm.errors import ClusterError

CLUSTER_ENV = "HYDROSLURM_CLUSTER"
"""Set to the cluster's folder in its daemons and slurmstepd, but not in jobs."""

_MARKER = "THIS-IS-FOR-TESTING-ONLY"
_LINK = "c"
_LINK_PREFIX = "hydroslurm-c-"
# the longest socket is slurmstepd's, here of a node of a cluster with cgroups:
# state/slurmd-nabcdef-64/nabcdef-64_4294967295.4294967295.4294967295
_LONGEST_BELOW_BASE = 67
_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True)
class Layout:
    """The paths of one cluster's folder. Making the value touches no disk."""

    root: Path

    marker = Below(_MARKER)
    lock = Below("lock")
    cluster_json = Below("cluster.json")
    conf = Below("conf")
    slurm_conf = Below("conf/slurm.conf")
    slurmdbd_conf = Below("conf/slurmdbd.conf")
    plugstack_conf = Below("conf/plugstack.conf")
    cgroup_conf = Below("conf/cgroup.conf")
    hosts = Below("conf/hosts")
    state = Below("state")
    run = Below("run")
    logs = Below("log")

    @classmethod
    def at(cls, directory: Path) -> Layout:
        """The layout of a folder, by its absolute name."""
        return cls(directory.expanduser().absolute())

    def key(self, auth: str) -> Path:
        return self.conf / f"{auth}.key"

    def log(self, daemon: str) -> Path:
        """The log of a daemon or of a program that helps to start one."""
        return self.logs / f"{daemon}.log"

    def console(self, daemon: str) -> Path:
        """What a Slurm daemon wrote to stdout and stderr: the same as to its log without the times,
        and what it says before it has read where its log is."""
        return self.logs / f"{daemon}.console.log"

    def create(self) -> None:
        """Make the folder ready for a new cluster, readable by its owner only.

        Raises:
            ClusterError: it cannot be made, or it holds something that no dev cluster left there.
            UntrustedFile: as :meth:`check`.
        """
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.check()
            if not self.marker.exists():
                strangers = sorted(entry.name for entry in self.root.iterdir())
                if strangers:
                    raise ClusterError(
                        f"{self.root} is not empty and not a dev cluster's folder (it has "
                        f"{', '.join(strangers[:3])}); choose an empty or a new one with --dir"
                    )
                self.marker.write_text(f"{WARNING}.\nMade by `hydroslurm cluster up`.\n")
            self.root.chmod(0o700)
            for part in (self.conf, self.state, self.run, self.logs):
                part.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ClusterError(
                f"cannot make the cluster's folder {self.root}: {error.strerror}. "
                "Choose another one with --dir, on a local disk"
            ) from error

    def check(self) -> None:
        """Require that nobody else can have put anything into the folder, if there is one. Daemons
        run what its configuration says, and the supervisor has it as its working directory; root's
        cluster would run a stranger's programs as root.

        Raises:
            UntrustedFile: somebody else owns it or a folder above it, or can write there.
        """
        with contextlib.suppress(FileNotFoundError):
            check_trusted(self.root, what="the cluster's folder")

    def remove_state(self) -> None:
        """Remove what only a running cluster needs; the logs stay."""
        if not self.marker.exists():
            return
        for part in (self.conf, self.state, self.run):
            shutil.rmtree(part, ignore_errors=True)
        # the lock's file stays: removed, two newcomers could each hold one of the same name
        self.cluster_json.unlink(missing_ok=True)

    def remove_logs(self) -> None:
        """Remove the logs of the cluster that was here before."""
        for log in self.logs.glob("*.log"):
            if log != self.log("supervisor"):  # it is being written
                log.unlink(missing_ok=True)

    def remove_all(self) -> None:
        """Remove the whole folder, logs included."""
        if self.marker.exists():
            shutil.rmtree(self.root, ignore_errors=True)


@contextlib.contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """Hold the folder's lock during the block.

    Raises:
        ClusterError: another cluster lives there.
    """
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ClusterError(
                f"a cluster is already up in {layout.root}. Use it (hydroslurm cluster env --dir "
                f"{layout.root}), end it (hydroslurm cluster down --dir {layout.root}), or choose "
                "another folder with --dir"
            ) from None
        yield
    finally:
        os.close(descriptor)


def make_link(root: Path, *, temporary: Path | None = None) -> Path:
    """Make the private folder with the short name; returns the link in it that leads to ``root``.

    Raises:
        ClusterError: no temporary folder has a name that is short enough.
    """
    candidates = [temporary or Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")]
    for candidate in candidates:
        longest = len(os.fsencode(candidate)) + len(f"/{_LINK_PREFIX}12345678/{_LINK}/")
        plain = " " not in str(candidate) and os.access(candidate, os.W_OK | os.X_OK)
        plain = plain and is_trusted(candidate)  # else others could let the link lead elsewhere
        if plain and longest + _LONGEST_BELOW_BASE <= _SOCKET_PATH_BYTES:
            link = Path(tempfile.mkdtemp(prefix=_LINK_PREFIX, dir=candidate)) / _LINK
            link.symlink_to(root)
            return link
    raise ClusterError(
        "no temporary folder is writable, safe from others and of a short name, as sockets need; "
        "tried "
        f"{', '.join(map(str, candidates))}. Set TMPDIR to a folder with a short name"
    )


def remove_link(link: Path) -> None:
    """Remove a link and its private folder, if they are ours."""
    if link.is_symlink() and link.parent.name.startswith(_LINK_PREFIX):
        link.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            link.parent.rmdir()
