"""examples/train_ddp.py and train_fsdp.py: two ranks of this machine, from the start to the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port

LIMIT_S = 300
WORLD = 2
EPOCHS = 2


@pytest.mark.parametrize("script", ["train_ddp.py", "train_fsdp.py"])
def test_two_ranks_train_to_the_end(script: str, root: Path, tmp_path: Path) -> None:
    """Warnings are errors. It learns, every sample is seen once per epoch, a line for
    people comes from one rank only, and the run is marked as finished."""
    out, run = tmp_path / "out.json", tmp_path / "run"
    command = [sys.executable, "-W", "error", str(root / "examples" / script)]
    options = [f"--directory={run}", f"--out={out}", f"--epochs={EPOCHS}", "--lr=5e-3"]
    port = free_port()
    ranks = [_start([*command, *options], rank=rank, port=port) for rank in range(WORLD)]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    assert said[1] == ""
    result = json.loads(out.read_text())
    assert f"weights  sha256 {result['weights_sha256']}" in said[0]
    assert result["accuracy"] > 0.4
    assert (result["world_size"], result["steps"]) == (WORLD, EPOCHS * 30)
    assert result["every_sample_once"] == [True] * EPOCHS
    assert result["steps_missing"] == []
    assert result["steps_trained_twice"] == 0
    assert (run / "finished.json").exists()


def _start(command: list[str], *, rank: int, port: int) -> subprocess.Popen[str]:
    """As torchrun would."""
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        command,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
