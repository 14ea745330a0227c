"""``run.steps()``: loops that fetch their own batches go on bit for bit, and what their writers
forget is found at the first step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from training.own_loops import LOOPS, STEPS
from zygote import forked

FROZEN = "frozen-00000.safetensors"
PROGRAM = Path(__file__).with_name("own_loops.py").read_text()


def attempt(name: str, folder: Path, *, stop: bool = False) -> tuple[int, list[str]]:
    """One process: its exit status, and its lines of losses and bits."""
    folder.mkdir(exist_ok=True)
    with forked(PROGRAM, folder, name, str(folder), "stop" if stop else "") as program:
        if stop:
            program.expect("at")
            program.signal(signal.SIGTERM)
        program.expect("loss" if stop else "bits")
        said = [line for line in program.lines if line.split()[0] in ("loss", "bits")]
        return program.wait(), said


@pytest.mark.parametrize("name", LOOPS)
def test_stopped_in_every_step(name: str, tmp_path: Path) -> None:
    """SIGTERM in each step from the first to the last, one process for each: the losses, weights,
    optimizers and random numbers of the run that was left alone."""
    code, alone = attempt(name, tmp_path / "alone")
    assert code == 0
    assert len(alone) == STEPS + 1
    said: list[str] = []
    frozen = []
    for _ in range(STEPS):
        code, lines = attempt(name, tmp_path / "stopped", stop=True)
        assert (code, len(lines)) == (75, 1)
        said += lines
        *_, newest = sorted(tmp_path.glob("stopped/**/step-*/"))
        if (newest / FROZEN).exists():
            frozen.append((newest / FROZEN).stat())
    if name == "adapter":  # what the last attempt but one has of it, which does not change
        assert all(130 * 130 * 4 < one.st_size < 130 * 130 * 5 for one in frozen)
        files = [one.st_ino for one in frozen]
        assert files == [files[number % 2] for number in range(STEPS)]
        assert files[0] != files[1]
    else:
        assert not frozen
    code, lines = attempt(name, tmp_path / "stopped")
    assert code == 0
    assert said + lines == alone
