"""Each training of examples/ stands alone under any name, and a stop costs it no bit; the demo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured, wait_until

from hydroslurm.errors import HydroslurmError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 300


def start(folder: Path, *options: str) -> subprocess.Popen[bytes]:
    """The folder's script; what it prints is added to its file ``log``."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    environ |= {"HYDROSLURM_PREEMPT": "requeue", "HYDROSLURM_RUN_DIR": str(folder / "run")}
    command = [sys.executable, "train.py", *options]
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environ)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options", "slowly"),
    [
        ("train_run.py", ["--epochs=4", "--log-every=10"], ["--think-s=0.05"]),
        ("train_lightning.py", ["--epochs=3"], ["--think-s=0.05"]),
        ("train_huggingface.py", ["--epochs=1"], []),
    ],
)
def test_stopped_and_started_again(
    name: str, options: list[str], slowly: list[str], tmp_path: Path
) -> None:
    """SIGTERM after some steps ends it with 75; the same command then trains to the same last lines
    as a training that nobody stopped."""
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    for folder in (alone, stopped):
        folder.mkdir()
        shutil.copy(EXAMPLES / name, folder / "train.py")

    def log(folder: Path) -> str:
        return (folder / "log").read_text()

    with start(alone, *options) as left_alone:
        with start(stopped, *options, *slowly) as first:
            wait_until(lambda: re.search(r"step 10\b|'loss'", log(stopped)), "a step")
            first.terminate()
            assert first.wait(LIMIT_S) == os.EX_TEMPFAIL, log(stopped)
        with start(stopped, *options) as again:
            assert again.wait(LIMIT_S) == 0, log(stopped)
        assert left_alone.wait(LIMIT_S) == 0, log(alone)
    result = r"^(?:accuracy|weights sha256|trained) .*$"
    seen = re.findall(result, log(stopped), flags=re.M)
    assert seen
    assert seen == re.findall(result, log(alone), flags=re.M)
    assert "resumes from step" in log(stopped)


DEMO = [sys.executable, "-W", "error", str(EXAMPLES / "demo.py")]


@pytest.mark.long
def test_second_act_without_slurm(tmp_path: Path) -> None:
    """A training that is ended twice with SIGTERM and started again has the bits of the other."""
    options = ["--local", "--act", "2", "--epochs", "4", "--dir", str(tmp_path)]
    done = captured([*DEMO, *options], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    wanted = "the same weights, optimizer and losses, bit for bit, after 2 stops"
    for words in (wanted, "Steps lost: 0.", "attempt 2 resumes from step"):
        assert words in done.stdout
    (picture,) = tmp_path.glob("*/act-2/runs/stopped/report/timeline.png")
    assert picture.stat().st_size > 5000


def test_a_wait_that_fails_shows_what_was_waited_for_and_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the log's name and its last ten lines; the wait itself fits the machine. On a site's
    Slurm the act has to be named, because a partition can show only one."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import demo_stage

    log = tmp_path / "logs/task.out"
    log.parent.mkdir()
    log.write_text("".join(f"line {number}\n" for number in range(12)))
    monkeypatch.setattr(demo_stage, "LIMIT_S", 0.01)
    monkeypatch.setattr(demo_stage.pace, "slowness", 5.0)
    with pytest.raises(HydroslurmError, match="for the first step") as failed:
        demo_stage.wait_for("the first step", lambda: False, run=tmp_path)
    words = str(failed.value).splitlines()
    assert words[0].endswith(f"The end of {log}:")
    assert [word.strip() for word in words[1:]] == [f"line {number}" for number in range(2, 12)]
    done = captured([*DEMO, "--site", "--low=a", "--urgent=b"], timeout=60)
    assert done.returncode == 2
    assert "--act 1, 2 or 3" in done.stderr
