"""Clusters with proctrack/cgroup: what they need, and that they touch nobody else's cgroups."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clusters import require_cgroups
from devcluster.traces import without_environment
from processes import wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster, cgroups
from hydroslurm.devcluster.config import CGROUPS
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import Running
from hydroslurm.errors import ClusterError


def of(folder: str, *, nodes: int = 2, constrain_memory: bool = False) -> ClusterSpec:
    return ClusterSpec(
        nodes=nodes,
        directory=Path(folder),
        proctrack="cgroup",
        constrain_memory=constrain_memory,
    )


def hierarchy(root: Path, *controllers: str) -> Path:
    """A folder that looks like the mounted controllers."""
    for name in controllers:
        (root / name).mkdir(parents=True)
        (root / name / "release_agent").touch()
    return root


def put_into(folder: Path, *pids: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
    return folder


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has what is needed, what is there, and what to do. An ordinary user is told that
    it is for root before anything starts; linuxproc asks for nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    spec = of("/a", constrain_memory=True)
    root = hierarchy(tmp_path / "v1", "freezer", "cpu")
    with pytest.raises(ClusterError, match="freezer, memory below") as caught:
        cgroups.require(spec, root=root)
    for part in ("memory cannot be used", "only cpu, freezer", "leave out"):
        assert part in str(caught.value)
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2/cgroup.controllers").write_text("memory\n")
    with pytest.raises(ClusterError, match="cgroup v2 alone is mounted"):
        cgroups.require(spec, root=tmp_path / "v2")
    both = hierarchy(tmp_path / "both", "freezer", "memory")
    cgroups.require(spec, root=both)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root, and this is user id 1000"):
        cgroups.require(of("/a"), root=both)
    cgroups.require(ClusterSpec(), root=tmp_path / "none")


def test_only_its_own_folders_are_touched(tmp_path: Path) -> None:
    """A Slurm of the machine's own, a cluster of another folder and one without cgroups keep
    theirs; processes are found in every controller and below. Where a node's cgroup has some
    already, the cluster does not start."""
    root = hierarchy(tmp_path, "freezer", "memory")
    mine, node = of("/a"), of("/a").node_names[0]
    put_into(root / f"freezer/slurm_{node}/uid_0/job_1", 12, 13)
    put_into(root / f"memory/slurm_{node}", 13, 14)
    foreign = [
        put_into(root / "freezer" / name, 99)
        for name in ("slurm", "slurm_n1", f"slurm_{of('/b').node_names[0]}")
    ]
    assert cgroups.processes_of(mine) == []
    assert cgroups.processes_of(mine, root=root) == [12, 13, 14]
    assert cgroups.processes_of(ClusterSpec(), root=root) == []
    with pytest.raises(ClusterError, match="holds processes of another cluster"):
        cgroups.require_own_names(mine, root=root)
    cgroups.require_own_names(of("/c"), root=root)
    (root / f"freezer/slurm_{node}/uid_0/job_1/freezer.state").write_text("FROZEN")
    (foreign[0] / "freezer.state").write_text("FROZEN")
    cgroups.thaw(mine, root=root)
    assert (root / f"freezer/slurm_{node}/uid_0/job_1/freezer.state").read_text() == "THAWED"
    assert (foreign[0] / "freezer.state").read_text() == "FROZEN"
    for path in root.rglob("*"):  # a real cgroup's files do not keep its folder
        if path.is_file():
            path.unlink()
    cgroups.remove(mine, root=root)
    assert not (root / f"freezer/slurm_{node}").exists()
    assert all(folder.exists() for folder in foreign)


@pytest.mark.slurm
def test_up_again_where_a_supervisor_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What still runs in the cgroups of the folder's last cluster is ended first, although it is
    frozen and has no environment."""
    spec = of(str(tmp_path / "c"), nodes=1)
    require_cgroups(spec)
    with DevCluster.up(spec) as cluster:
        submit = ["sbatch", "--parsable", "-o", "/dev/null", "--wrap", "srun sleep 614"]
        job = cluster.run(submit).stdout.strip()
        step = ["squeue", "-s", "-h", "-j", job, "-o", "%i"]
        wait_until(lambda: f"{job}.0" in cluster.run(step, check=False).stdout, "the job step")
        cluster.run(["scontrol", "suspend", job])
        node = f"slurm_{cluster.spec.node_names[0]}"
        frozen = (CGROUPS / "freezer" / node).rglob
        wait_until(
            lambda: "FROZEN\n" in [file.read_text() for file in frozen("freezer.state")],
            "the freezer",
        )
        without_environment(monkeypatch, left := cgroups.processes_of(cluster.spec))
        assert left
        running = Running.read(Layout.at(tmp_path / "c"))
        assert running is not None
        running.supervisor.send(signal.SIGKILL)
        wait_until(lambda: not running.supervisor.alive, "the supervisor's end")
        with DevCluster.up(spec) as again:
            assert cgroups.processes_of(again.spec) == []
            assert again.run(["srun", "echo", "here"]).stdout == "here\n"
    assert not list(CGROUPS.glob(f"*/{node}"))
