"""From up to down, and every other way to the end: nothing is left running, and no file outside."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import require_slurm
from devcluster.traces import links_to, processes_of, system_files, without_environment
from processes import Child, child, has_ended, wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster, processes
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import Running
from hydroslurm.errors import ClusterError

pytestmark = pytest.mark.slurm

# A job that ignores SIGTERM and leaves a child behind that has detached itself from everything.
JOB = "trap '' TERM; setsid sleep 611 & srun sleep 612; sleep 613"

# Its arguments: a folder, or "" for a temporary one; what to run in a job, or "".
CALLER = """\
import os, sys, time
from pathlib import Path
from hydroslurm.devcluster import ClusterSpec, DevCluster
folder = Path(sys.argv[1]) if sys.argv[1] else None
with DevCluster.up(ClusterSpec(nodes=1, directory=folder)) as cluster:
    cluster.run(["sbatch", "-o", "/dev/null", "--wrap", sys.argv[2]])
    while "1.0" not in cluster.run(["squeue", "-s", "-h", "-o", "%i"], check=False).stdout:
        time.sleep(0.05)
    if sys.argv[3:] == ["fork"] and os.fork() == 0:
        os.close(1), os.close(2)
        time.sleep(600)
    print("up", cluster.directory, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _slurm() -> Iterator[None]:
    require_slurm()
    before = system_files()
    yield
    assert system_files() <= before


def nothing_is_left(folder: Path) -> None:
    """Wait until no process and no link of a cluster is there."""
    wait_until(lambda: not processes_of(str(folder)), f"the end of {processes_of(str(folder))}")
    assert links_to(folder) == []


def start_job(cluster: DevCluster) -> str:
    """Submit JOB, and wait until its srun has started a job step."""
    submit = ["sbatch", "--parsable", "-o", "/dev/null", "--wrap", JOB]
    job = cluster.run(submit).stdout.strip()
    step = ["squeue", "-s", "-h", "-j", job, "-o", "%i"]
    wait_until(lambda: f"{job}.0" in cluster.run(step, check=False).stdout, "the job step")
    return job


def test_down_leaves_the_logs_and_nothing_else(tmp_path: Path) -> None:
    """In a deep folder with an odd name: jobs run, also one suspended at the end, and a dead daemon
    is named; `down` ends all, keeps the logs, may be called twice; the folder can be used again."""
    folder = tmp_path / "a name, with #blanks" / ("deep" * 30)
    spec = ClusterSpec(nodes=2, directory=folder)
    cluster = DevCluster.up(spec)
    try:
        start_job(cluster)
        cluster.run(["scontrol", "suspend", start_job(cluster)])
        with pytest.raises(ClusterError, match="a cluster is already up in"):
            DevCluster.up(spec)
        assert all(daemon.alive for daemon in cluster.status().daemons)
        assert links_to(folder)
        (node,) = (d for d in cluster.status().daemons if d.name == "slurmd-n1")
        os.kill(node.pid, signal.SIGKILL)
        wait_until(
            lambda: [d.name for d in cluster.status().daemons if not d.alive] == ["slurmd-n1"],
            "the dead daemon in the status",
        )
    finally:
        cluster.down()
    cluster.down()
    nothing_is_left(folder)
    left = sorted(entry.name for entry in folder.iterdir())
    assert left == ["THIS-IS-FOR-TESTING-ONLY", "lock", "log"]
    log = Layout(folder).log("slurmctld").read_text()
    assert re.search("(Allocate|backfill.*Started) JobId=2 ", log)  # whichever scheduler is first
    with pytest.raises(ClusterError, match="no cluster is up in"):
        DevCluster.attach(folder)
    with DevCluster.up(spec) as again:
        assert [node.state for node in again.status().nodes] == ["idle", "idle"]


def test_the_end_of_the_caller_is_the_end_of_all(tmp_path: Path) -> None:
    """A caller that is killed while a child that it forked lives on and holds its pipes leaves no
    process, no job and no folder behind."""
    with child(CALLER, tmp_path, "", JOB, "fork", prefix=("setsid",)) as caller:
        folder = Path(caller.expect("up "))
        try:
            caller.signal(signal.SIGKILL)
            assert caller.wait() == -signal.SIGKILL
            nothing_is_left(folder)
            wait_until(lambda: not folder.exists(), "the temporary folder to go")
        finally:
            os.killpg(caller.pid, signal.SIGKILL)


def test_ctrl_c_while_starting(tmp_path: Path) -> None:
    """Ctrl-C to the whole process group while the daemons are being started ends those that have
    been."""
    folder = tmp_path / "c"
    with child(CALLER, tmp_path, str(folder), JOB, prefix=("setsid",)) as caller:
        wait_until((folder / "log" / "mariadbd.log").exists, "the first daemons")
        os.killpg(caller.pid, signal.SIGINT)
        assert caller.wait() == -signal.SIGINT
    nothing_is_left(folder)
    assert not (folder / "cluster.json").exists()


def test_a_killed_supervisor_is_cleaned_up_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the supervisor is killed its daemons die; `down` finds and ends the jobs, a slurmstepd
    without an environment by the log that it holds open, and spares a shell that only points at the
    cluster."""
    cluster = DevCluster.up(ClusterSpec(nodes=1, directory=tmp_path / "c"), detach=True)
    shell = Child("print('ready', flush=True); input()", tmp_path, environ=cluster.environ())
    try:
        shell.expect("ready")
        start_job(cluster)
        running = Running.read(Layout(cluster.directory))
        assert running is not None
        steps: list[int] = []

        def are_there() -> bool:  # squeue shows a step before slurmd has forked for it
            below = processes.descendants(running.supervisor.pid)
            steps[:] = [pid for pid in below if processes.command_name(pid) == "slurmstepd"]
            return len(steps) == 2

        wait_until(are_there, "the script's slurmstepd and srun's")
        without_environment(monkeypatch, steps)
        running.supervisor.send(signal.SIGKILL)
        wait_until(lambda: not any(p.alive for _, p in running.daemons), "the daemons to die")
        assert not any(map(has_ended, steps)), "the job outlives the daemons"
        cluster.down()
        assert [line.split()[0] for line in processes_of(str(tmp_path / "c"))] == [str(shell.pid)]
        assert all(map(has_ended, steps))
    finally:
        cluster.down()
        shell.close()
    nothing_is_left(tmp_path / "c")


def test_a_daemon_that_dies_at_the_start_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the daemon and has its own last lines; nothing is left running."""
    broken = tmp_path / "slurm.conf"
    broken.write_text("NoSuchKey=1\n")
    line = f'[ "$1" = -V ] && exec {{real}} -V; exec {{real}} -D -f {broken}'
    _on_path(tmp_path, "slurmctld", line, monkeypatch)
    with pytest.raises(ClusterError) as caught:
        DevCluster.up(ClusterSpec(nodes=1, directory=tmp_path / "c"))
    words = str(caught.value)
    assert words.startswith("slurmctld ended while the cluster was starting, exit status 1")
    assert "unrecognized key: NoSuchKey" in words
    nothing_is_left(tmp_path / "c")
    assert (tmp_path / "c" / "log" / "slurmctld.console.log").exists()


def test_without_slurms_headers_it_comes_up_without_preempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing is said, to the caller and in plugstack.conf; all else works."""
    line = 'case "$*" in *slurm/spank.h*) exit 1 ;; esac; exec {real} "$@"'
    _on_path(tmp_path, "cc", line, monkeypatch)
    with DevCluster.up(ClusterSpec(nodes=1)) as cluster:
        assert "libslurm-dev" in cluster.no_preempt
        assert "# no --preempt: " in Layout(cluster.directory).plugstack_conf.read_text()
        assert cluster.run(["srun", "echo", "here"]).stdout == "here\n"
        assert "--preempt" not in cluster.run(["srun", "--help"]).stdout


def _on_path(folder: Path, name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program before the real one on PATH; ``{real}`` in its line is the real one's path."""
    places = [*os.environ["PATH"].split(":"), "/usr/sbin"]
    real = next(p for place in places if (p := Path(place) / name).exists())
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{line.format(real=real)}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
