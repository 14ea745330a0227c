"""A real TensorBoard beside a job: it reads real logs, and is there exactly as long as the job."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from integration.trainingjob.scene import Scene, is_alive
from processes import child, wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.plan import TensorBoardPlan
from hydroslurm.jobs.supervisor.tensorboard import Address, read_address, tensorboard

WRITER = """
import os, pathlib, time
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(f"tb logs/attempt {os.environ.get('SLURM_RESTART_COUNT', 0)}") as writer:
    writer.add_scalar("loss", 0.5, 1)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
SPEC = """
name: watched
replicaSpecs:
  - template: {command: [python, -c, 'WRITER']}
tensorboard: {logDirectory: tb logs}
"""


@pytest.mark.slurm
def test_tensorboard_of_a_job(jobs_cluster: DevCluster, tmp_path: Path) -> None:
    """It answers its page on loopback and shows what the ranks write; describe has its address. It
    ends with a killed supervisor, a requeue and the job, and comes again with the first two."""
    scene = Scene(jobs_cluster, tmp_path / "job")
    scene.folder.mkdir()
    (scene.folder / "writer.py").write_text(WRITER)
    spec = SPEC.replace("-c, 'WRITER'", "writer.py")
    (scene.folder / "job.yaml").write_text(spec)
    scene.submit_file(scene.folder / "job.yaml")

    first = _answering(scene, unlike=0)
    assert first.host == "127.0.0.1"
    with urllib.request.urlopen(first.url) as page:
        assert b"<html" in page.read().lower()
    scene.wait(lambda: "attempt 0" in _ask(first, "data/runs"), "a run in TensorBoard")
    scene.wait(
        lambda: "loss" in _ask(first, "data/plugin/scalars/tags").get("attempt 0", {}),
        "the scalar in TensorBoard",
    )
    described = scene.hydroslurm("describe", str(scene.job_id)).stdout
    assert re.search(rf"TensorBoard: +{first.url} on {socket.gethostname()}\n", described)
    assert f"ssh -N -L {first.port}:127.0.0.1:{first.port} {first.node}\n" in described

    scene.kill_supervisor(with_shell=False)
    second = _answering(scene, unlike=first.pid)
    assert not is_alive(first.pid)
    scene.slurm("scontrol", "requeue", str(scene.job_id))
    third = _answering(scene, unlike=second.pid)
    assert not is_alive(second.pid)
    scene.wait(lambda: "attempt 1" in _ask(third, "data/runs"), "the second attempt's run")

    scene.touch("go")
    assert scene.final_condition().type == "Succeeded"
    scene.wait(lambda: not is_alive(third.pid), "TensorBoard's end")
    scene.wait(lambda: not scene.run.tensorboard_json.exists(), "end of the address")
    ended = scene.hydroslurm("describe", str(scene.job_id)).stdout
    assert "TensorBoard:  ended with the job" in ended


def _answering(scene: Scene, *, unlike: int) -> Address:
    """The address of another TensorBoard than that process."""

    def found() -> Address | None:
        address = read_address(scene.run.tensorboard_json)
        return None if address is None or address.pid == unlike else address

    scene.wait(lambda: found() is not None, "an address of TensorBoard")
    address = found()
    assert address is not None
    return address


def _ask(address: Address, what: str) -> Any:
    with urllib.request.urlopen(f"{address.url}{what}") as answer:
        return json.load(answer)


def test_none_installed_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job runs without it; the note says what to install, in the log that describe names."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run, said = RunDir(tmp_path / "run").create(), list[str]()
    with tensorboard(TensorBoardPlan(str(tmp_path), 0, "127.0.0.1"), run, log=said.append):
        pass
    (note,) = said
    assert "pip install tensorboard" in note
    assert "The job runs without" in note
    assert run.tensorboard_log.read_text() == f"{note}\n"
    assert read_address(run.tensorboard_json) is None


def test_port_in_use_is_one_note(tmp_path: Path) -> None:
    """TensorBoard ends at once; who asked for it is told where to look, and goes on."""
    run, said = RunDir(tmp_path / "run").create(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wanted = TensorBoardPlan(str(tmp_path / "new/logs"), taken.getsockname()[1], "127.0.0.1")
        with tensorboard(wanted, run, log=said.append):
            wait_until(lambda: said, "the note")
    (note,) = said
    assert "TensorBoard ended with status " in note
    assert str(run.tensorboard_log) in note
    assert str(wanted.port) in run.tensorboard_log.read_text()
    assert (tmp_path / "new/logs").is_dir()


def test_it_ends_with_a_killed_parent(tmp_path: Path) -> None:
    """Whatever kills the process that started it, also before it answers."""
    code = """
    import os, pathlib, signal, sys
    from hydroslurm.core.rundir import RunDir
    from hydroslurm.jobs.plan import TensorBoardPlan
    from hydroslurm.jobs.supervisor.tensorboard import tensorboard
    run = RunDir(pathlib.Path(sys.argv[1])).create()
    with tensorboard(TensorBoardPlan(f"{run.root}/runs", 0, "127.0.0.1"), run, log=print):
        print("child", pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text())
        signal.pause()
    """
    with child(code, tmp_path, str(tmp_path / "run")) as parent:
        board = int(parent.expect("child"))
        parent.signal(signal.SIGKILL)
        wait_until(lambda: not is_alive(board), "end of TensorBoard")


def test_address_for_people() -> None:
    """Loopback is reached through ssh; what binds more, by the node's name."""
    loopback = Address("node7", "127.0.0.1", 6006, 1)
    assert loopback.url == "http://127.0.0.1:6006/"
    assert loopback.tunnel == "ssh -N -L 6006:127.0.0.1:6006 node7"
    everywhere = Address("node7", "0.0.0.0", 6006, 1)
    assert (everywhere.url, everywhere.tunnel) == ("http://node7:6006/", None)
