"""The machine's cgroups (v1) for the slurmds of one dev cluster: checked and removed.

slurmd creates ``<controller>/slurm_<node>`` in every hierarchy it uses, puts its jobs' processes
below it, and leaves the empty folders behind. All slurmds of a machine share the hierarchies, even
other people's: only folders with the names of this cluster's nodes are touched.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hydroslurm.devcluster.config import CGROUPS
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError


def require(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Require the controllers that Slurm will need.

    Raises:
        ClusterError: this is not root, or the machine has no such controllers (without systemd,
            Slurm 22.05 cannot use those of cgroup v2).
    """
    if spec.proctrack != "cgroup":
        return
    if os.geteuid() != 0:
        raise ClusterError(
            f"proctrack/cgroup needs root, and this is user id {os.geteuid()}. Run it as root, or "
            "leave out --proctrack cgroup: linuxproc is for everybody"
        )
    needed = ("freezer", "memory") if spec.constrain_memory else ("freezer",)
    # Slurm considers a hierarchy mounted if it has this file, which only its root has
    missing = [name for name in needed if not os.access(root / name / "release_agent", os.W_OK)]
    if missing:
        only_v2 = (root / "cgroup.controllers").exists()
        seen = "cgroup v2 alone is mounted there" if only_v2 else f"{_names(root)} there"
        raise ClusterError(
            f"proctrack/cgroup needs the cgroup v1 controllers {', '.join(needed)} below {root}, "
            f"writable; {', '.join(missing)} cannot be used ({seen}). Boot with "
            "systemd.unified_cgroup_hierarchy=0, in a container mount the controllers, or leave "
            "out --proctrack cgroup. (v2 has not been tried: Slurm 22.05 wants systemd for it)"
        )


def require_own_names(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Require that no other nodes have these names, once this folder's last cluster is gone.

    Raises:
        ClusterError: their cgroups contain processes.
    """
    taken = [folder for folder in _folders(spec, root=root) if inside(folder)]
    if taken:
        raise ClusterError(
            f"{taken[0]} holds processes of another cluster with nodes of the same names "
            f"({', '.join(spec.node_names)}); choose another folder with --dir"
        )


def processes_of(spec: ClusterSpec, *, root: Path = CGROUPS) -> list[int]:
    """Return all processes in the cgroups of this cluster's nodes, slurmstepd among them."""
    return sorted({pid for folder in _folders(spec, root=root) for pid in inside(folder)})


def thaw(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Thaw everything that a suspend has frozen: a frozen process does not die of SIGKILL."""
    for folder in _folders(spec, root=root):
        for below, _, files in os.walk(folder):
            if "freezer.state" in files:
                with contextlib.suppress(OSError):
                    Path(below, "freezer.state").write_text("THAWED")


def remove(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Remove the folders left by this cluster's slurmds, except those with processes."""
    for folder in _folders(spec, root=root):
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(below).rmdir()


def inside(folder: Path) -> set[int]:
    """Return the processes of a cgroup and its descendants."""
    pids: set[int] = set()
    for below, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            pids |= set(map(int, Path(below, "cgroup.procs").read_text().split()))
    return pids


def _folders(spec: ClusterSpec, *, root: Path) -> list[Path]:
    """Return existing folders; none without cgroups, when others may use the same node names."""
    if spec.proctrack != "cgroup":
        return []
    return [
        folder
        for controller in sorted(root.iterdir())
        for node in spec.node_names
        if (folder := controller / f"slurm_{node}").is_dir()
    ]


def _names(root: Path) -> str:
    names = sorted(folder.name for folder in root.iterdir()) if root.is_dir() else []
    return f"only {', '.join(names)}" if names else "nothing"
