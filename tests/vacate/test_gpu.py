"""On a device: a vacate frees the memory, and the weights come back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Child, child

from hydroslurm.runtime import client
from hydroslurm.vacate.cuda_checkpoint import why_not_here

pytestmark = pytest.mark.gpu

TRAIN = """
    import hashlib, sys, torch, hydroslurm
    hydroslurm.install(run_dir=sys.argv[1])
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(*[torch.nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, 4096, device="cuda")
    print("ready", flush=True)
    for step in range(int(sys.argv[2])):
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if step % 20 == 0 and len(sys.argv) > 3:  # a pause between two of them
            torch.cuda.synchronize()
            print("step", flush=True)
            sys.stdin.readline()
    one = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    print("hash", hashlib.sha256(one).hexdigest(), flush=True)
"""
STEPS = "100"
ENVIRON = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@pytest.fixture
def environ() -> dict[str, str]:
    """Of a training that vacates."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("this torch finds no CUDA device")
    if reason := why_not_here():
        pytest.skip(reason)
    pytest.importorskip("cuda.bindings.driver", reason="needs hydroslurm[gpu]")
    return ENVIRON


def _used_bytes() -> int:
    import torch

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


def _free_and_return(process: Child) -> None:
    before_bytes = _used_bytes()
    answer = client.pause(process.pid, vacate=True, timeout_s=120)
    assert answer.done, answer.message
    assert answer.vacated_bytes
    freed_bytes = before_bytes - _used_bytes()
    assert freed_bytes > 0.9 * answer.vacated_bytes - 10**9  # the context is an estimate
    resumed = client.resume(process.pid, timeout_s=120)
    assert resumed.done, resumed.message


def test_ten_vacates_leave_the_bits(environ: dict[str, str], tmp_path: Path) -> None:
    """The device's memory falls at each vacate, and the weights' hash after ten of
    them is that of an undisturbed run."""
    (tmp_path / "plain").mkdir()
    with child(TRAIN, tmp_path / "plain", str(tmp_path / "a"), STEPS, environ=environ) as process:
        wanted = process.expect("hash")
    with child(TRAIN, tmp_path, str(tmp_path / "b"), STEPS, "held", environ=environ) as process:
        process.expect("ready")
        for _ in range(int(STEPS) // 20):
            process.expect("step")
            for _ in range(2):
                _free_and_return(process)
            process.say("go on")
        assert process.expect("hash") == wanted
