"""A notebook's kernel in an allocation of salloc: paused and continued, stopped, and run again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import Part
from jupyter_client import BlockingKernelClient
from processes import wait_until

from hydroslurm.core.status import read_status
from hydroslurm.training.attempts import AttemptLog

pytestmark = [pytest.mark.slurm, pytest.mark.long]

CELL = """
import time, torch, hydroslurm
from pathlib import Path
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
with hydroslurm.Run(model=model, optimizer=optimizer, directory={folder!r}) as run:
    run.resume()
    for _ in run.steps(1000):
        loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep({pause_s})
print("weights", [one.tolist() for one in model.parameters()])
"""


class Notebook:
    """A kernel's client; ``said`` is what its cells have printed."""

    def __init__(self, file: Path) -> None:
        self.client = BlockingKernelClient(connection_file=str(file))
        self.client.load_connection_file()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.said = self.cell = ""

    def begin(self, folder: Path, *, pause_s: float = 0.0) -> None:
        """Start the cell."""
        self.cell = self.client.execute(CELL.format(folder=str(folder), pause_s=pause_s))

    def ended(self) -> str:
        """Wait for the cell; ``ok``, or the name of its exception."""
        while (message := self.client.get_iopub_msg(timeout=120)) is not None:
            if message["parent_header"].get("msg_id") == self.cell:
                self.said += message["content"].get("text", "")
                if message["content"] == {"execution_state": "idle"}:
                    break
        while (reply := self.client.get_shell_msg(timeout=120)) is not None:
            if reply["parent_header"].get("msg_id") == self.cell:
                break
        return str(reply["content"].get("ename") or reply["content"]["status"])


def test_a_kernel_in_salloc(requeue_cluster: Part, tmp_path: Path) -> None:
    """A suspend parks the cell, a resume continues it. SIGTERM saves, ends the cell and not the
    kernel, and says that nobody requeues it; a preemption saves, too. The same cell in the next
    allocation resumes: its weights are those of one that nobody stopped."""
    node, run = requeue_cluster.nodes[0], tmp_path / "run"

    def kernel(name: str) -> Notebook:
        file = tmp_path / f"{name}.json"
        command = ["salloc", "--quiet", "--ntasks=1", f"--nodelist={node}", "srun"]
        command += [sys.executable, "-m", "ipykernel_launcher", "-f", str(file)]
        with (tmp_path / "salloc.txt").open("ab") as log:
            environ = requeue_cluster.child_environ()
            started = subprocess.Popen(command, env=environ, stdout=log, stderr=log, cwd=tmp_path)
        salloc.append(started)
        wait_until(file.exists, "the kernel")
        return Notebook(file)

    def wait_for(state: str, *, step: int = 0) -> None:
        path = tmp_path / f"hydroslurm-runs/{job()}/events/rank-00000.json"

        def reached() -> bool:
            status = read_status(path)
            return status is not None and status.state == state and (status.step or 0) >= step

        wait_until(reached, lambda: f"{state} at step {step}: {read_status(path)}")

    def job() -> str:
        return requeue_cluster.run(["squeue", "-h", "-o", "%i", "-w", node]).stdout.strip()

    salloc: list[subprocess.Popen[bytes]] = []
    try:
        notebook = kernel("first")
        notebook.begin(run, pause_s=0.05)
        wait_for("running", step=5)
        requeue_cluster.run(["scontrol", "suspend", job()])
        wait_for("parked")
        requeue_cluster.run(["scontrol", "resume", job()])
        wait_for("running")
        requeue_cluster.run(["scancel", "--signal=TERM", job()])
        assert notebook.ended() == "ExitForRequeue", notebook.said
        assert "made by srun or salloc, which Slurm cannot requeue" in notebook.said
        notebook.begin(run)
        assert notebook.ended() == "UsageError"  # that kernel has stopped
        requeue_cluster.run(["scancel", job()])
        salloc[0].wait(60)
        notebook = kernel("second")
        notebook.begin(run, pause_s=0.05)
        wait_for("running", step=AttemptLog(run / "attempts.jsonl").attempts()[0].end_step + 1)
        urgent = ("--partition=urgent", "--exclusive", "--time=1", f"--nodelist={node}")
        requeue_cluster.run(["srun", *urgent, "true"])
        assert salloc[1].wait(60) != 0
        notebook = kernel("third")
        for folder in (run, tmp_path / "undisturbed"):
            notebook.begin(folder)
            assert notebook.ended() == "ok", notebook.said
        resumed, undisturbed = re.findall(r"^weights .*", notebook.said, re.MULTILINE)
        assert resumed == undisturbed
        attempts = AttemptLog(run / "attempts.jsonl").attempts()
        assert [one.step for one in attempts[1:]] == [one.end_step for one in attempts[:2]]
    finally:
        requeue_cluster.run(["scancel", f"--nodelist={node}", "--full"], check=False)
        for one in salloc:
            one.wait(60)
