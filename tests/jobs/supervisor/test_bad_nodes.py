"""Which nodes failures are blamed on, and what a node is checked for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from hydroslurm.jobs.supervisor.bad_nodes import blamed, cause_in, check_node
from hydroslurm.jobs.supervisor.exit_policy import Action, ExitDecision

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def failure(*nodes: str, cause: str = "") -> ExitDecision:
    return ExitDecision(Action.RESTART, message="it failed", failed_on=nodes, cause=cause)


N1, N2, BOTH, ALONE = failure("n1"), failure("n2"), failure("n1", "n2"), failure()


@pytest.mark.parametrize(
    ("ends", "nodes"),
    [
        ([], []),
        ([N1], []),
        ([N1, N1], ["n1"]),
        ([N1, None], []),
        ([N1, None, N1], []),
        ([N2, N1, N1], []),
        ([N2, None, N1, N1], ["n1"]),
        ([N1, N1, N2, N2], []),
        ([BOTH, BOTH], []),
        ([BOTH, N1, N1], []),
        ([ALONE, ALONE, ALONE], []),
        ([N1, ALONE, N1], []),
        ([N2, failure("n1", cause=ECC)], ["n1"]),
        ([failure("n1", cause=ECC), N2], []),
    ],
)
def test_a_node_is_blamed_where_others_do_not_fail(
    ends: list[ExitDecision | None], nodes: list[str]
) -> None:
    """Twice in a row on one node and nowhere else, or once where the cause is plainly the node's;
    an attempt that ends otherwise ends the row."""
    assert list(blamed(ends)) == nodes


@pytest.mark.parametrize(
    ("line", "is_of_the_node"),
    [
        (ECC, True),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", True),
        ("torch.distributed.DistBackendError: ncclSystemError: System call failed", True),
        ("OSError: [Errno 28] No space left on device: '/tmp/cache/x'", True),
        ("OSError: [Errno 28] No space left on device: '/home/ada/runs/x'", False),
        ("ncclRemoteError: a remote process exited or there was a network error", False),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("torch.OutOfMemoryError: CUDA out of memory", False),
    ],
)
def test_what_is_plainly_a_nodes_fault(line: str, is_of_the_node: bool) -> None:
    """A shared file system, a lost peer and the script's own mistakes are not."""
    lines = [b"Traceback ...", line.encode(), b"frame #0: ..."]
    assert cause_in(lines) == (line if is_of_the_node else "")


SMI = """#!/bin/sh
# as nvidia-smi prints what --query-gpu and --query-compute-apps ask for
case "$*" in
    *--id=0,1*--query-gpu=uuid) echo GPU-1; %s;;
    *--id=0,1*--query-compute-apps=*) %s;;
esac
"""


@pytest.mark.parametrize(
    ("second_gpu", "apps", "given", "ahead_s", "problem"),
    [
        ("echo GPU-2", "", {}, 4, ""),
        ("echo Unable to determine the device handle", "", {}, 0, "1 of 2 GPUs answer: GPU-1"),
        ("echo GPU-2", "echo GPU-1, 4711, 80 MiB", {}, 0, "a GPU is in use: GPU-1, 4711, 80 MiB"),
        ("", "", {"SLURM_GPUS_ON_NODE": "0"}, 0, ""),
        ("echo GPU-2", "", {"SLURM_MEM_PER_NODE": str(1 << 30)}, 0, "MiB of memory are free, and"),
        ("echo GPU-2", "", {}, -63, "its clock is -63 s from that of the file system"),
    ],
)
def test_what_a_node_is_checked_for(
    tmp_path: Path, second_gpu: str, apps: str, given: Mapping[str, str], ahead_s: float,
    problem: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """GPUs that answer and are idle, the memory that the job has asked for, and the clock."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + ahead_s)
    program = tmp_path / "nvidia-smi"
    program.write_text(SMI % (second_gpu or ":", apps or ":"))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {"SLURM_GPUS_ON_NODE": "2", "CUDA_VISIBLE_DEVICES": "0,1", **given}
    assert problem in (found := check_node(tmp_path, environ))
    assert bool(found) == bool(problem)
    assert [one.name for one in tmp_path.iterdir()] == ["nvidia-smi"]


@pytest.mark.parametrize(
    ("folder", "command", "status", "said"),
    [
        (".", ["false"], 1, ""),
        (".", ["not-there"], 1, "hydroslurm: preflight failed: not-there cannot be run: No such"),
        ("not/there", ["true"], 1, "hydroslurm: preflight failed: no file in "),
        (".", [], 0, ""),
    ],
)
def test_the_program_of_a_node(
    tmp_path: Path, folder: str, command: list[str], status: int, said: str
) -> None:
    """Its last line says what is wrong, and it ends as the command does."""
    words = [sys.executable, "-m", "hydroslurm.jobs.supervisor.bad_nodes", "--node"]
    done = subprocess.run(
        [*words, tmp_path / folder, *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert (done.stdout.splitlines() or [""])[-1].startswith(said)
