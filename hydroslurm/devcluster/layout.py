"""The only place that spells the paths of a dev cluster, and creates and removes its files.

    <folder>/
      THIS-IS-FOR-TESTING-ONLY  marks the folder; without it nothing is ever removed
      lock                      held by the supervisor while the cluster lives
      cluster.json              what runs, while it runs
      conf/  state/  run/       configuration and key, the daemons' data, sockets and pid files
      log/                      one file per daemon; stays after the end

While it is up, the system's temporary folder has a private folder with a short name. It contains a
link to the cluster's folder, through which the daemons see everything: so Unix sockets stay below
their 107 bytes, and slurm.conf never contains a blank, however deep and odd the folder's own name
is.
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
    """The paths of one cluster's folder. Creating the value touches no disk."""

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
        """Return the layout of a folder, with its absolute path."""
        return cls(directory.expanduser().absolute())

    def key(self, auth: str) -> Path:
        return self.conf / f"{auth}.key"

    def log(self, daemon: str) -> Path:
        """Return the log of a daemon or of a program that helps to start one."""
        return self.logs / f"{daemon}.log"

    def console(self, daemon: str) -> Path:
        """Return a Slurm daemon's stdout and stderr: its log without times, and its output before
        it knows where to log."""
        return self.logs / f"{daemon}.console.log"

    def create(self) -> None:
        """Prepare the folder for a new cluster, readable by its owner only.

        Raises:
            ClusterError: it cannot be created, or contains something not left by a dev cluster.
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
        """Require that only we can have put anything into the folder, if it exists. Daemons run
        what its configuration says, in this working directory; root's cluster would run other
        users' programs as root.

        Raises:
            UntrustedFile: another user owns it or a folder above it, or can write there.
        """
        with contextlib.suppress(FileNotFoundError):
            check_trusted(self.root, what="the cluster's folder")

    def remove_state(self) -> None:
        """Remove what only a running cluster needs; keep the logs."""
        if not self.marker.exists():
            return
        for part in (self.conf, self.state, self.run):
            shutil.rmtree(part, ignore_errors=True)
        # keep the lock's file: if removed, two newcomers could each hold one of the same name
        self.cluster_json.unlink(missing_ok=True)

    def remove_logs(self) -> None:
        """Remove the previous cluster's logs."""
        for log in self.logs.glob("*.log"):
            if log != self.log("supervisor"):  # it is open
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
    """Create the private folder with the short name; return the link in it to ``root``.

    Raises:
        ClusterError: no temporary folder has a short enough name.
    """
    candidates = [temporary or Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")]
    for candidate in candidates:
        longest = len(os.fsencode(candidate)) + len(f"/{_LINK_PREFIX}12345678/{_LINK}/")
        plain = " " not in str(candidate) and os.access(candidate, os.W_OK | os.X_OK)
        plain = plain and is_trusted(candidate)  # else others could redirect the link
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
