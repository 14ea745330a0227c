"""A real TensorBoard beside a job: it reads real logs, and is there exactly as long as the job."""

from __future__ import annotations

import json
import re
import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from integration.trainingjob.scene import Scene
from processes import has_ended, wait_until

from hydroslurm.core.rundir import RunDir
from hydroslurm.devcluster import DevCluster
from hydroslurm.jobs.plan import TensorBoardPlan
from hydroslurm.jobs.supervisor.tensorboard import Address, read_address, tensorboard

WRITER = """
import pathlib, time
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter("tb logs/attempt 0") as writer:
    writer.add_scalar("loss", 0.5, 1)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""
SPEC = """
replicaSpecs: [{template: {command: [python, writer.py]}}]
tensorboard: {logDirectory: tb logs}
"""


@pytest.mark.slurm
def test_tensorboard_of_a_job(jobs_cluster: DevCluster, tmp_path: Path) -> None:
    """It answers its page on loopback and shows what the ranks write; describe has its address. It
    ends with a killed supervisor and with the job, and comes again with the next supervisor."""
    scene = Scene(jobs_cluster, tmp_path / "job")
    scene.folder.mkdir()
    (scene.folder / "writer.py").write_text(WRITER)
    (scene.folder / "job.yaml").write_text(SPEC)
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
    assert has_ended(first.pid)
    scene.touch("go")
    assert scene.final_condition().type == "Succeeded"
    scene.wait(lambda: has_ended(second.pid), "TensorBoard's end")
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
