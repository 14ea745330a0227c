"""Hugging Face's Trainer and accelerate, stopped at all kinds of places: the attempts together are
an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

SCENES = Path(__file__).with_name("transformers_scenes.py")
SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
STOPPED = 75


def play(scene: str, folder: Path, *stops: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, SCENES, scene, folder / "runs", *stops],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout.splitlines()[-1]), "said": ran.stderr}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scene", "stops"),
    [
        pytest.param(
            "plain", "start step:1 micro:3 eval:2 step:6 epoch:1 step:8 epoch:2 eval:2",
            id="before the first step, within one, at the ends of epochs, in evaluations",
        ),
        pytest.param(
            "best", "step:2 epoch:1 eval:1 step:12 eval:3 epoch:3",
            id="early stopping, the best model loaded at the end",
        ),
        pytest.param("accumulate", "every", id="accumulation, averages of a subclass"),
        pytest.param("one", "every", id="epochs of one step"),
        *(
            pytest.param(*one, marks=pytest.mark.frameworks)
            for one in (
                ("plain", "every"),
                ("workers", "every"),
                ("persistent", "step:2 step:6 step:8"),
                ("one", "epoch:1 eval:1 epoch:2"),
                ("stream", "every"),
                ("stream", "eval:1 epoch:1 eval:2"),
                ("stream accumulated", "every"),
                ("early", "start step:3 eval:1 step:9 step:10 eval:2"),
            )
        ),
    ],
)  # fmt: skip
def test_stopped_run_is_the_undisturbed_one(scene: str, stops: str, tmp_path: Path) -> None:
    """What is trained, logged and saved, and train()'s result, are the same."""
    found = play(scene, tmp_path, *stops.split())
    assert found["undisturbed_exits"] == [0]
    assert found["stopped_exits"][-1] == 0, found["said"]
    assert set(found["stopped_exits"][:-1]) == {STOPPED}
    if stops != "every":
        assert len(found["stopped_exits"]) == 1 + len(stops.split())
    assert found["stopped"] == found["undisturbed"]


class Script:
    """A script that is run again while it ends with 75, as a requeue does."""

    def __init__(self, name: str, folder: Path, *arguments: str, ranks: int = 1) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        self.folder = folder
        self.output = folder / "output"
        self._command = [
            sys.executable, *(launcher if ranks > 1 else []),
            str(SCRIPTS / name), str(self.output), *arguments,
        ]  # fmt: skip
        self.said = folder / "said"
        folder.mkdir()

    def run(self, stops: list[int], *, to: int | None = None) -> list[int]:
        """The exit statuses; an attempt gets SIGTERM when it has said a line ``step`` so often.

        Args:
            to: the rank that gets it; None: the process that was started.
        """
        statuses = []
        while len(statuses) < 20:
            with self.said.open("ab") as said, subprocess.Popen(
                self._command, stdout=said, stderr=said,
                env={
                    **os.environ, "HYDROSLURM_PREEMPT": "requeue", "OMP_NUM_THREADS": "1",
                    "HYDROSLURM_RUN_DIR": str(self.folder / "run"),
                },
            ) as process:  # fmt: skip
                seen = self._steps()
                if len(statuses) < len(stops):
                    self._wait_for(seen + stops[len(statuses)], process)
                    os.kill(process.pid if to is None else _rank(process.pid, to), signal.SIGTERM)
                statuses.append(process.wait(300))
            if statuses[-1] != STOPPED:
                break
        return statuses

    def _steps(self) -> int:
        return self.said.read_text().count("\nstep ") if self.said.exists() else 0

    def _wait_for(self, steps: int, process: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + 300
        while self._steps() < steps:
            assert process.poll() is None, self.said.read_text()[-4000:]
            assert time.monotonic() < until_s, self.said.read_text()[-4000:]
            time.sleep(0.05)

    def results(self) -> dict[str, str]:
        return {one.name: one.read_text() for one in sorted(self.output.glob("*")) if one.is_file()}


def _rank(launcher: int, rank: int) -> int:
    """The process of one rank below torchrun."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environ:
            return int(child)
    raise AssertionError(children)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "arguments"),
    [
        pytest.param("hf_causal_lm.py", 1, "--workers 2 --jit", id="workers, JIT asked for"),
        pytest.param("accelerate_loop.py", 1, "--workers 2 --accumulate 4", id="accelerate"),
        *(
            pytest.param(name, ranks, f"--workers {workers} --accumulate {accumulate}",
                         marks=pytest.mark.frameworks)
            for name in ("hf_causal_lm.py", "accelerate_loop.py", "trl_sft.py")
            for ranks in (1, 2)
            for workers in (0, 2)
            for accumulate in (1, 4)
        ),
    ],
)  # fmt: skip
def test_script_is_resumed(name: str, ranks: int, arguments: str, tmp_path: Path) -> None:
    """Losses and weights are those of a run that nobody has stopped."""
    whole = Script(name, tmp_path / "whole", *arguments.split(), ranks=ranks)
    assert whole.run([]) == [0], whole.said.read_text()[-4000:]
    cut = Script(name, tmp_path / "cut", *arguments.split(), "--pause-s", "0.1", ranks=ranks)
    stops = [random.Random(arguments).choice((1, 2, 3)) * ranks for _ in range(3)]
    statuses = cut.run(stops, to=None if ranks == 1 else 1)
    assert statuses[-1] == 0, cut.said.read_text()[-4000:]
    assert len(statuses) >= 3
    assert cut.results() == whole.results()
    if "--jit" in arguments:
        assert "enable_jit_checkpoint of transformers stands down" in cut.said.read_text()
