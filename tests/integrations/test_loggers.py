"""One logical run in the loggers, over attempts that are stopped and killed."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import zygote
from integrations.proofs import LIGHTNING, TRANSFORMERS

from hydroslurm.integrations import loggers

SCENES = Path(__file__).with_name("logging_scenes.py")


@pytest.mark.parametrize("damaged", ['{"wandb": "4', '{"wandb": 4}', "[[]]", " " * 70_000, None])
def test_a_damaged_file_of_ids_costs_no_training(
    damaged: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The attempt has a run of its own in the loggers, and says so."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    if damaged is None:  # a device
        (tmp_path / "loggers.json").symlink_to("/dev/zero")
    else:
        (tmp_path / "loggers.json").write_text(damaged)
    handler = SimpleNamespace(callbacks=[type("WandbCallback", (), {})()])
    trainer = SimpleNamespace(
        args=None, is_world_process_zero=lambda: True, callback_handler=handler
    )
    with caplog.at_level("WARNING", logger="hydroslurm"):
        loggers.continue_callbacks(trainer, tmp_path, anew=False)
    assert "is damaged" in caplog.text
    kept = json.loads((tmp_path / "loggers.json").read_text())
    assert kept == {"wandb": os.environ["WANDB_RUN_ID"]}


def test_a_save_reads_the_new_rows_only(tmp_path: Path) -> None:
    """Of a CSV file with any number of rows; one with another header was written again."""
    metrics, count = tmp_path / "metrics.csv", loggers._RowCount()
    for text, rows in (
        ("", 0),
        ("a\n" + "1\n" * 1000, 1000),
        ("a\n" + "1 " * 1000 + "1\n" * 3, 1003),  # the old ones are not looked at
        ("a,7\n" + "1,\n" * 7, 7),
        ("a,7\n" + "1,\n" * 2, 2),
    ):
        metrics.write_text(text)
        assert count.of(metrics) == rows


@pytest.mark.skipif(find_spec("wandb") is None, reason="no wandb: make setup installs it")
@pytest.mark.parametrize(
    "framework", ["lightning", pytest.param("transformers", marks=pytest.mark.long)]
)
def test_attempts_continue_one_run(framework: str, tmp_path: Path) -> None:
    """TensorBoard, CSV and Weights & Biases (offline) have what they have of an undisturbed run:
    under one version and one id, each row once, none in the place of another. The third attempt is
    killed two steps behind a periodic save."""
    loads = LIGHTNING if framework == "lightning" else TRANSFORMERS
    stops = ("stop:4", "stop:7", "kill:11")
    ran = zygote.ran([SCENES, framework, tmp_path / "runs", *stops], loads=loads)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    whole, stopped = found["undisturbed"], found["stopped"]
    assert (whole["exits"], stopped["exits"]) == ([0], [75, 75, -9, 0])
    assert stopped["csv"] == whole["csv"]
    assert stopped["tensorboard"] == whole["tensorboard"]
    assert len(stopped["wandb ids"]) == len(whole["wandb ids"]) == 1
    assert stopped["wandb ids"] != whole["wandb ids"]
    assert len(whole["wandb"]) >= 16
    # what wandb had not written when it was killed is not there; what is there is in its place
    pairs = list(zip(stopped["wandb"], whole["wandb"], strict=True))
    assert [one for one, other in pairs if one not in (other, None)] == []
    first, second, killed, last = stopped["wandb steps"]
    assert [first[0], second[0]] == [0, first[-1] + 1]
    assert len(first) > 1
    assert len(second) > 1
    assert last[-1] == len(whole["wandb"]) - 1
    assert killed == [] or killed[0] == second[-1] + 1
