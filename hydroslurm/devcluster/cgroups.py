"""The machine's cgroups (v1) that the slurmds of one dev cluster use: asked for, and removed.

slurmd makes ``<controller>/slurm_<node>`` in every hierarchy that it uses, puts the processes of
its jobs below it, and leaves the empty folders behind. All slurmds of a machine share the
hierarchies, other people's too: only folders with the names of this cluster's nodes are touched.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hydroslurm.devcluster.config import CGROUPS
from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError


def require(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Make sure that Slurm can use the controllers that it will need.

    Raises:
        ClusterError: this is not root, or the machine has no such controllers (those of cgroup v2
            are none for Slurm 22.05 without systemd).
    """
    if spec.proctrack != "cgroup":
        return
    if os.geteuid() != 0:
        raise ClusterError(
            f"proctrack/cgroup needs root, and this is user id {os.geteuid()}. Run it as root, or "
            "leave out --proctrack cgroup: linuxproc is for everybody"
        )
    needed = ("freezer", "memory") if spec.constrain_memory else ("freezer",)
    # Slurm takes a hierarchy for mounted when it has this file, which only its root has
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
    """Make sure that nobody has nodes of the same names; after this folder's last cluster is gone.

    Raises:
        ClusterError: there are processes in their cgroups.
    """
    taken = [folder for folder in _folders(spec, root=root) if inside(folder)]
    if taken:
        raise ClusterError(
            f"{taken[0]} holds processes of another cluster with nodes of the same names "
            f"({', '.join(spec.node_names)}); choose another folder with --dir"
        )


def processes_of(spec: ClusterSpec, *, root: Path = CGROUPS) -> list[int]:
    """Every process in a cgroup of this cluster's nodes; slurmstepd is one."""
    return sorted({pid for folder in _folders(spec, root=root) for pid in inside(folder)})


def thaw(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Let everything run that a suspend has frozen: a frozen process does not die of SIGKILL."""
    for folder in _folders(spec, root=root):
        for below, _, files in os.walk(folder):
            if "freezer.state" in files:
                with contextlib.suppress(OSError):
                    Path(below, "freezer.state").write_text("THAWED")


def remove(spec: ClusterSpec, *, root: Path = CGROUPS) -> None:
    """Remove the folders that this cluster's slurmds left; those with a process in them stay."""
    for folder in _folders(spec, root=root):
        for below, _, _ in os.walk(folder, topdown=False):
            with contextlib.suppress(OSError):
                Path(below).rmdir()


def inside(folder: Path) -> set[int]:
    """The processes of a cgroup and of all below it."""
    found: set[int] = set()
    for below, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            found |= set(map(int, Path(below, "cgroup.procs").read_text().split()))
    return found


def _folders(spec: ClusterSpec, *, root: Path) -> list[Path]:
    """Those that exist; none without cgroups, when the nodes have names that others may use too."""
    if spec.proctrack != "cgroup":
        return []
    return [
        folder
        for controller in sorted(root.iterdir())
        for node in spec.node_names
        if (folder := controller / f"slurm_{node}").is_dir()
    ]


def _names(root: Path) -> str:
    found = sorted(one.name for one in root.iterdir()) if root.is_dir() else []
    return f"only {', '.join(found)}" if found else "nothing"
