"""HFAI's example with its imports changed: stopped by SIGTERM, and gone on with."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "hfai_example.py"
STEPS = 200


def start(folder: Path) -> subprocess.Popen[bytes]:
    """As torchrun starts a single rank; what it prints is added to a file."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = str(one.getsockname()[1])
    torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with (folder / "out").open("ab") as out:
        return subprocess.Popen(
            [sys.executable, SCRIPT], cwd=folder, stdout=out, stderr=subprocess.STDOUT,
            env={**os.environ, **torchrun, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )  # fmt: skip


@pytest.mark.slow
def test_the_example_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Each step once; the file of the stop is gone when the training has come to its end."""
    out = tmp_path / "out"
    first = start(tmp_path)
    wait_until(lambda: "step 20\n" in out.read_text(), "step 20")
    first.terminate()
    assert first.wait(60) == 75, out.read_text()
    assert (tmp_path / "checkpoints" / "suspended.ckpt").exists()
    assert start(tmp_path).wait(120) == 0, out.read_text()
    said = out.read_text()
    assert said.count("F.layer_norm(1e-05)") == 2  # what nn_to_hfai has found, in each attempt
    steps = [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ")]
    assert steps == list(range(STEPS))
    assert f"done at {STEPS} False" in said
