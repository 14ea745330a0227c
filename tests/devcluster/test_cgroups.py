"""Clusters with proctrack/cgroup: what they need, and that they touch nobody else's cgroups."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from clusters import require_cgroups, require_slurm
from processes import wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster, cgroups, processes
from hydroslurm.devcluster.cluster import end_cluster
from hydroslurm.devcluster.config import CGROUPS
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import Running
from hydroslurm.errors import ClusterError, UsageError

JOB = "srun sleep 614"


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


def test_node_names_are_a_clusters_own() -> None:
    """Two clusters share no node name, hence no cgroup; the same folder has the same names."""
    names = [set(of(folder).node_names) for folder in ("/a", "/b")]
    assert not names[0] & names[1]
    assert of("/a").node_names == of("/a").node_names
    assert ClusterSpec(nodes=2, directory=Path("/a")).node_names == ("n1", "n2")


def test_memory_is_constrained_by_cgroups_only() -> None:
    """A limit that nothing would enforce is refused."""
    with pytest.raises(UsageError, match="constrain_memory needs cgroups"):
        ClusterSpec(constrain_memory=True)
    with pytest.raises(UsageError, match="must be one of linuxproc, cgroup"):
        ClusterSpec(proctrack="pgid")  # type: ignore[arg-type]


def test_missing_controllers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has what is needed, what is there, and what to do."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    spec = of("/a", constrain_memory=True)
    root = hierarchy(tmp_path / "v1", "freezer", "cpu")
    with pytest.raises(ClusterError) as caught:
        cgroups.require(spec, root=root)
    for part in (
        "freezer, memory below",
        "memory cannot be used",
        "only cpu, freezer",
        "leave out",
    ):
        assert part in str(caught.value)
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2/cgroup.controllers").write_text("memory\n")
    with pytest.raises(ClusterError, match="cgroup v2 alone is mounted"):
        cgroups.require(spec, root=tmp_path / "v2")
    cgroups.require(spec, root=hierarchy(tmp_path / "both", "freezer", "memory"))


def test_it_is_for_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary user is told so before anything starts; linuxproc asks for nothing."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root, and this is user id 1000"):
        cgroups.require(of("/a"), root=hierarchy(tmp_path, "freezer"))
    cgroups.require(ClusterSpec(), root=tmp_path / "none")


def test_only_its_own_folders_are_touched(tmp_path: Path) -> None:
    """A Slurm of the machine's own, a cluster of another folder and one without cgroups keep
    theirs; processes are found in every controller and below."""
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


def test_nodes_of_somebody_else_are_not_taken(tmp_path: Path) -> None:
    """Where a node's cgroup has processes already, the cluster does not start."""
    root = hierarchy(tmp_path, "freezer")
    put_into(root / f"freezer/slurm_{of('/a').node_names[1]}/uid_0", 12)
    with pytest.raises(ClusterError, match="holds processes of another cluster"):
        cgroups.require_own_names(of("/a"), root=root)
    cgroups.require_own_names(of("/b"), root=root)


@pytest.mark.slurm
def test_up_again_where_a_supervisor_was_killed(tmp_path: Path) -> None:
    """What still runs in the cgroups of the folder's last cluster is ended first, frozen or not."""
    spec = of(str(tmp_path / "c"), nodes=1)
    require_cgroups(spec)
    with DevCluster.up(spec) as cluster:
        cluster.run(["scontrol", "suspend", _start_job(cluster)])
        wait_until(lambda: "FROZEN" in _states(cluster), "the freezer")
        left = cgroups.processes_of(cluster.spec)
        running = Running.read(Layout.at(tmp_path / "c"))
        assert running is not None
        running.supervisor.send(signal.SIGKILL)
        wait_until(lambda: not running.supervisor.alive, "the supervisor's end")
        assert left
        with DevCluster.up(spec) as again:
            assert cgroups.processes_of(again.spec) == []
            assert again.run(["srun", "echo", "here"]).stdout == "here\n"
    assert not _left(cluster)


@pytest.mark.slurm
@pytest.mark.parametrize("proctrack", ["linuxproc", "cgroup"])
def test_a_job_step_without_environment_is_found(
    proctrack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 25.11 empties the environment of slurmstepd: after a SIGKILL of the supervisor the job
    steps are found all the same, by the log that they hold open, or by their cgroup."""
    require_slurm()
    spec = ClusterSpec(nodes=1, directory=tmp_path / "c", proctrack=proctrack)  # type: ignore[arg-type]
    if proctrack == "cgroup":
        require_cgroups(spec)
    with DevCluster.up(spec) as cluster:
        _start_job(cluster)
        running = Running.read(Layout.at(tmp_path / "c"))
        assert running is not None
        # the script's and srun's
        wait_until(lambda: len(_steps_of(running)) == 2, "two slurmstepd")
        steps = _steps_of(running)
        held = [one for pid in steps if (one := processes.ProcessId.of(pid))]
        asked = processes.environment
        monkeypatch.setattr(
            "hydroslurm.devcluster.processes.environment",
            lambda pid: {} if pid in steps else asked(pid),
        )
        running.supervisor.send(signal.SIGKILL)
        wait_until(lambda: not running.supervisor.alive, "the supervisor's end")
        assert any(one.alive for one in held)
        end_cluster(tmp_path / "c")
        assert not any(one.alive for one in held)
    assert not _left(cluster)


def _start_job(cluster: DevCluster) -> str:
    command = ["sbatch", "--parsable", "-o", "/dev/null", "--wrap", JOB]
    job = cluster.run(command).stdout.strip()
    step = ["squeue", "-s", "-h", "-j", job, "-o", "%i"]
    wait_until(lambda: f"{job}.0" in cluster.run(step, check=False).stdout, "the job step")
    return job


def _steps_of(running: Running) -> list[int]:
    below = processes.descendants(running.supervisor.pid)
    return [pid for pid in below if processes.command_name(pid) == "slurmstepd"]


def _states(cluster: DevCluster) -> set[str]:
    (node,) = cluster.spec.node_names
    files = (CGROUPS / f"freezer/slurm_{node}").rglob("freezer.state")
    return {file.read_text().strip() for file in files}


def _left(cluster: DevCluster) -> list[Path]:
    names = [f"slurm_{node}" for node in cluster.spec.node_names]
    return [path for name in names for path in CGROUPS.glob(f"*/{name}")]
