"""One logical run in the loggers, over attempts that are stopped and killed."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import zygote
from integrations.proofs import ACCELERATE, LIGHTNING, TRANSFORMERS

from hydroslurm.training import loggers

SCENES = Path(__file__).with_name("logging_scenes.py")
TRACKERS = ("mlflow", "wandb")
needs_trackers = pytest.mark.skipif(
    find_spec("wandb") is None or find_spec("mlflow") is None,
    reason="no wandb or no mlflow: make setup installs them",
)


@pytest.mark.parametrize("damaged", ['{"wandb": "4', '{"wandb": []}', "[[]]", " " * 70_000, None])
def test_a_damaged_file_of_ids_costs_no_training(
    damaged: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The attempt has a run of its own in the loggers, and says so."""
    if damaged is None:  # a device
        (tmp_path / "loggers.json").symlink_to("/dev/zero")
    else:
        (tmp_path / "loggers.json").write_text(damaged)
    with caplog.at_level("WARNING", logger="hydroslurm"):
        loggers.Trackers(tmp_path, anew=False, is_first=True)
    assert "is damaged" in caplog.text
    assert "WANDB_RUN_ID" not in os.environ


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


@needs_trackers
@pytest.mark.parametrize(
    ("framework", "loads"),
    [
        ("own", TRACKERS),
        pytest.param("lightning", LIGHTNING, marks=pytest.mark.long),
        pytest.param("transformers", TRANSFORMERS, marks=pytest.mark.long),
        pytest.param("accelerate", ACCELERATE, marks=pytest.mark.long),
    ],
)
def test_attempts_continue_one_run(framework: str, loads: tuple[str, ...], tmp_path: Path) -> None:
    """TensorBoard, CSV, Weights & Biases (offline) and MLflow have what they have of an undisturbed
    run: under one version and one id, each row once, none in the place of another. An attempt that
    stops is marked as preempted, not as failed. The third one is killed two steps behind a periodic
    save: MLflow, which removes nothing, has what is repeated twice, with equal values."""
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
    assert stopped["wandb ends"] == ["preempted 75", "preempted 75", "", "0"]
    assert (whole["mlflow ends"], stopped["mlflow ends"]) == (
        ["FINISHED"],
        ["SCHEDULED", "SCHEDULED", "RUNNING", "FINISHED"],
    )
    assert len(stopped["mlflow"]) == len(whole["mlflow"]) == 1
    (rows,), (all_rows,) = stopped["mlflow"], whole["mlflow"]
    assert {name: set(map(tuple, values)) for name, values in rows.items()} == {
        name: set(map(tuple, values)) for name, values in all_rows.items()
    }
    assert max(map(len, all_rows.values())) >= 16
    twice = max(len(rows[name]) - len(all_rows[name]) for name in rows)
    assert 1 <= twice <= 4  # back to step 9, or to 7 if that save was not committed yet


@needs_trackers
def test_an_error_is_no_good_end(tmp_path: Path) -> None:
    """MLflow by itself would finish a run that is not in a ``with`` block."""
    ran = zygote.ran([SCENES, "own", tmp_path / "runs", "fail:5"], loads=TRACKERS)
    assert ran.returncode == 0, ran.stderr
    failed = json.loads(ran.stdout.splitlines()[-1])["stopped"]
    ends = failed["exits"], failed["mlflow ends"], failed["wandb ends"]
    assert ends == ([1], ["FAILED"], ["1"])
