"""Hugging Face's Trainer and accelerate, stopped at all kinds of places: the attempts together are
an undisturbed run."""

from __future__ import annotations

import contextlib
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
from processes import free_port

SCENES = Path(__file__).with_name("transformers_scenes.py")
BY_REWARDS = Path(__file__).with_name("trl_scenes.py")
SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
STOPPED = 75
ADAPTER = """
import sys, torch
from transformers import Trainer, TrainingArguments
from hydroslurm.integrations.transformers import make_preemptible

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(2, 10000).requires_grad_(False)
        self.net = torch.nn.Linear(10000, 1)
    def forward(self, x, labels=None):
        return {"loss": (self.net(self.base(x)) - labels).square().mean()}

rows = [{"x": torch.ones(2), "labels": torch.zeros(1)} for _ in range(8)]
arguments = TrainingArguments(
    "out", max_steps=4, per_device_train_batch_size=2, report_to=[], save_strategy="no",
    use_cpu=True,
)
trainer = Trainer(model=Model(), args=arguments, train_dataset=rows)
make_preemptible(trainer, directory="run", every_steps=1).train()
"""


def play(scene: str, folder: Path, *stops: str, program: Path = SCENES) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, program, scene, folder / "runs", *stops],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return {**json.loads(ran.stdout.splitlines()[-1]), "said": ran.stderr}


@pytest.mark.parametrize(
    ("scene", "stops"),
    [
        pytest.param(
            "plain", "start step:2 micro:3 eval:2 epoch:1 step:8 epoch:2 eval:2",
            id="before the first step, within one, at the ends of epochs, in evaluations",
        ),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (
                ("best", "step:2 epoch:1 eval:1 step:12 eval:3 epoch:3"),
                ("accumulate", "every"),
                ("one", "every"),
                ("plain", "every"),
                ("workers", "every"),
                ("collator", "every"),
                ("masks", "every"),
                ("persistent", "step:2 step:6 step:8"),
                ("one", "epoch:1 eval:1 epoch:2"),
                ("own methods", "every"),
                ("model_init", "every"),
                ("jit", "step:3 step:9"),
                ("fractions", "every"),
                ("plateau", "every"),
                ("scaled", "every"),
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


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        # completions are used in four steps; a reference model that follows the model
        "--items 4 --moving-reference",
        "--items 6 --accumulate 2 --generations 4 --workers 2",
        "--items 16 --method dpo --moving-reference",
    ],
)
def test_training_by_rewards_and_by_preferences(arguments: str, tmp_path: Path) -> None:
    """TRL's trainers, stopped behind each step: what they generate, log and learn is the same."""
    found = play(arguments, tmp_path, program=BY_REWARDS)
    assert found["undisturbed_exits"] == [0]
    steps = sum(note.partition(" ")[0].isdigit() for note in found["undisturbed"])
    assert found["stopped_exits"] == [*[STOPPED] * steps, 0], found["said"]
    assert found["stopped"] == found["undisturbed"]
    assert "is not saved" not in found["said"]


class Script:
    """A script that is run again while it ends with 75, as a requeue does."""

    def __init__(self, name: str, folder: Path, *arguments: str, ranks: int = 1) -> None:
        self.folder, self.ranks = folder, ranks
        self.output = folder / "output"
        self._command = [sys.executable, str(SCRIPTS / name), str(self.output), *arguments]
        self.said = folder / "said"
        folder.mkdir()

    def run(self, stops: list[int]) -> list[int]:
        """The exit statuses; in an attempt the last rank gets SIGTERM when this many more lines
        ``step`` have been said."""
        statuses: list[int] = []
        while len(statuses) < 20:
            with contextlib.ExitStack() as ended, self.said.open("ab") as said:
                port = str(free_port())
                started = [
                    ended.enter_context(subprocess.Popen(
                        self._command, stdout=said, stderr=said, env=self._environ(rank, port)
                    ))
                    for rank in range(self.ranks)
                ]  # fmt: skip
                if len(statuses) < len(stops):
                    self._wait_for(self._steps() + stops[len(statuses)], started[-1])
                    started[-1].send_signal(signal.SIGTERM)  # it may have ended
                codes = {process.wait(300) for process in started}
            assert len(codes) == 1, self.said.read_text()[-4000:]
            statuses += codes
            if statuses[-1] != STOPPED:
                break
        return statuses

    def _environ(self, rank: int, port: str) -> dict[str, str]:
        ranks = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        }  # fmt: skip
        return {
            **os.environ, "HYDROSLURM_PREEMPT": "requeue", "OMP_NUM_THREADS": "1",
            "HYDROSLURM_RUN_DIR": str(self.folder / "run"), **(ranks if self.ranks > 1 else {}),
        }  # fmt: skip

    def _steps(self) -> int:
        return self.said.read_text().count("\nstep ")

    def _wait_for(self, steps: int, process: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + 300
        while self._steps() < steps:
            if process.poll() is not None:
                return
            assert time.monotonic() < until_s, self.said.read_text()[-4000:]
            time.sleep(0.05)

    def results(self) -> dict[str, str]:
        return {one.name: one.read_text() for one in sorted(self.output.glob("*")) if one.is_file()}


@pytest.mark.parametrize(
    ("name", "ranks", "arguments"),
    [
        pytest.param("accelerate_loop.py", 1, "--workers 1 --accumulate 2", id="accelerate"),
        pytest.param(
            "trl_rewarded.py", 2, "--items 16 --accumulate 2 --generations 4",
            marks=pytest.mark.long, id="trl_rewarded.py-2",
        ),
        *(
            pytest.param(name, ranks, f"--workers {workers} --accumulate {accumulate}",
                         marks=pytest.mark.long)
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
    stops = [random.Random(arguments).choice((1, 2, 3)) * ranks for _ in range(2)]
    statuses = cut.run(stops)
    assert statuses[-1] == 0, cut.said.read_text()[-4000:]
    assert len(statuses) >= 2
    assert cut.results() == whole.results()


def test_what_is_not_trained_is_apart(tmp_path: Path) -> None:
    """In files that later checkpoints share."""
    ran = subprocess.run(
        [sys.executable, "-c", ADAPTER], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    files = list(tmp_path.glob("run/checkpoints/*/frozen-00000.safetensors"))
    assert len(files) == 2
    assert all(80_000 < file.stat().st_size < 82_000 for file in files)
