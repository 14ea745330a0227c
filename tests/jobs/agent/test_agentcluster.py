"""Agents as the tasks of a job on a real Slurm: suspend, resume, stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs.agent.agentworkers import Scene
from processes import is_stopped, wait_until

from hydroslurm.devcluster import DevCluster

pytestmark = pytest.mark.slurm

KEEP_ALIVE_S = 2

SCRIPT = """#!/bin/bash
#SBATCH --partition=low --nodes=2 --ntasks-per-node=1 --no-requeue --time=5
{exports}
srun --kill-on-bad-exit=1 {python} -m hydroslurm.cli agent -- \\
    --nnodes=1:2 --nproc-per-node=2 --max-restarts=3 \\
    --rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2 \\
    {worker} {folder}
echo "srun left with $?" >> {folder}/status
"""


@pytest.fixture
def submitted(pause_cluster: DevCluster, tmp_path: Path) -> Iterator[tuple[Scene, str]]:
    """A job of two nodes with two workers each, which have announced themselves, and its id."""
    scene = Scene(tmp_path)
    exports = "\n".join(f"export {name}={value}" for name, value in scene.environ.items())
    script = tmp_path / "job.sh"
    script.write_text(
        SCRIPT.format(exports=exports, python=sys.executable, worker=scene.script, folder=tmp_path)
    )
    command = ["sbatch", "--parsable", f"--output={tmp_path}/log", f"--chdir={tmp_path}"]
    job_id = pause_cluster.run([*command, str(script)]).stdout.strip()
    try:
        for rank in range(4):
            scene.wait_told(rank, "announced")
        yield scene, job_id
    finally:
        pause_cluster.run(["scancel", "--signal=KILL", job_id], check=False)
        print((tmp_path / "log").read_text() if (tmp_path / "log").exists() else "no log")


def test_suspend_resume_restart_and_stop(
    pause_cluster: DevCluster, submitted: tuple[Scene, str]
) -> None:
    """The tasks find each other without a word about where, and the first of them has the first
    ranks also where fewer would do. Both nodes report parked before the SIGSTOP, and running in the
    same processes after more than the keep-alive; a worker that fails then is started again with
    all others, in the same order, and at a stop the nodes leave together with 75."""
    scene, job_id = submitted
    places = [f"task {rank // 2}, master 127.0.0.1, of 4" for rank in range(4)]
    assert [scene.places(rank) for rank in range(4)] == [[place] for place in places]
    before = scene.pids()
    pause_cluster.run(["scontrol", "suspend", job_id])
    _wait_states(scene, "slurm_pause", "parked")
    wait_until(lambda: all(is_stopped(pid) for pid in before), "SIGSTOP has come")
    time.sleep(2 * KEEP_ALIVE_S)
    pause_cluster.run(["scontrol", "resume", job_id])
    _wait_states(scene, "slurm_resume", "running")
    time.sleep(KEEP_ALIVE_S)  # the heartbeats that follow are what would find the nodes dead
    assert scene.pids() == before
    scene.leave(3, 1)
    for rank in range(4):
        scene.wait_told(rank, "announced", times=2)
    assert [scene.places(rank) for rank in range(4)] == [[place] * 2 for place in places]
    pause_cluster.run(["scancel", "--signal=TERM", job_id])
    for rank in range(4):
        scene.wait_told(rank, "SIGTERM")
    for rank in range(4):
        scene.leave(rank, 75)
        scene.wait_told(rank, "leaves 75")
    status = scene.folder / "status"
    wait_until(status.exists, "srun has left")
    assert status.read_text() == "srun left with 75\n"
    for node in range(2):
        assert [event.data["status"] for event in scene.events("agent_left", node=node)] == [75]
        assert {event.job_id for event in scene.events("node_state", node=node)} == {int(job_id)}


def _wait_states(scene: Scene, asked: str, state: str) -> None:
    for node in range(2):
        scene.wait_state(asked, state, node=node)
