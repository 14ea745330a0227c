"""HFAI's example on two ranks, and its callback wherever a stop may come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zygote
from integrations.proofs import LIGHTNING
from processes import wait_until

SCRIPT = Path(__file__).parents[1] / "integration" / "scripts" / "hfai_example.py"
STEPS = 200
Scene = tuple[list[int], list[str]]
"""How its attempts ended, and what they have noted."""


@pytest.mark.long
def test_two_ranks_of_torchrun(tmp_path: Path) -> None:
    """A SIGTERM to the second rank alone stops both at one step, and both go on from there."""
    argv = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]

    def begin() -> subprocess.Popen[bytes]:
        with (tmp_path / "out").open("ab") as out:
            return subprocess.Popen(
                [*argv, SCRIPT], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT
            )

    first = begin()
    out = tmp_path / "out"
    wait_until(lambda: "step 20\n" in out.read_text(), "step 20", limit_s=120)
    os.kill(rank_below(first.pid, 1), signal.SIGTERM)
    first.wait(60)
    assert "SIGTERM received by rank 1" in out.read_text()
    assert out.read_text().count("(exitcode: 75)") + out.read_text().count(": 75 (pid") >= 2
    assert begin().wait(120) == 0, out.read_text()
    steps = [int(line.split()[1]) for line in out.read_text().splitlines() if line[:5] == "step "]
    assert sorted(steps) == sorted([*range(STEPS // 2), *range(STEPS // 2)])


def rank_below(pid: int, rank: int) -> int:
    """The process of torchrun's that has this rank."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"torchrun has no rank {rank}")


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Scene]:
    """Each a training with its stops; torch and Lightning are loaded once."""
    scenes = Path(__file__).with_name("hfai_scenes.py")
    done = zygote.ran([scenes, tmp_path_factory.mktemp("scenes")], loads=LIGHTNING)
    assert done.returncode == 0, done.stderr
    found: dict[str, Scene] = json.loads(done.stdout.splitlines()[-1])
    return found


def without(notes: list[str], *left_out: str) -> list[str]:
    """What was noted, but for the first of each of these, and the files that were gone on from."""
    kept = [line for line in notes if not line.startswith("file ")]
    for line in left_out:
        kept.remove(line)
    return kept


@pytest.mark.parametrize("name", ["end_of_epoch", "before_a_validation"])
def test_a_stop_before_a_validation(scenes: dict[str, Scene], name: str) -> None:
    """It is done once, by the next attempt, and the module's own hook has been called."""
    exits, notes = scenes[name]
    whole = scenes["undisturbed" if name == "end_of_epoch" else "undisturbed_often"][1]
    assert exits == [75, 0]
    assert without(notes) == whole


@pytest.mark.parametrize(
    ("name", "step"), [("in_validation", 6), ("in_the_last_validation", 12), ("in_a_validation", 3)]
)
def test_a_stop_within_a_validation(scenes: dict[str, Scene], name: str, step: int) -> None:
    """It is obeyed there, and the next attempt begins the validation anew."""
    exits, notes = scenes[name]
    whole = scenes["undisturbed_often" if name == "in_a_validation" else "undisturbed"][1]
    assert set(exits[:-1]) == {75}
    assert exits[-1] == 0
    begun = (f"validation 0 at {step}", f"validation 1 at {step}")
    assert without(notes, *begun) == whole


def test_killed_in_the_middle_of_the_save(scenes: dict[str, Scene]) -> None:
    """The file of the stop before stays as it was, the training goes on from it, and what was
    written of the new one is gone in the end."""
    exits, notes = scenes["killed_in_the_save"]
    assert exits == [75, -signal.SIGKILL, 0]
    files = [line for line in notes if line.startswith("file ")]
    assert len(files) == 2
    assert files[0] == files[1]
    again = ("step 2 of epoch 0", "trained 3", "step 3 of epoch 0", "trained 4")
    assert without(notes, *again) == scenes["undisturbed"][1]
