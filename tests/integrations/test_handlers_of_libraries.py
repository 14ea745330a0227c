"""Libraries that take signals around and within the trainings of two frameworks in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hydroslurm.core.rundir import RUN_DIR_ENV
from hydroslurm.runtime.autoload import PREEMPT_ENV

SCRIPT = Path(__file__).with_name("handlers_of_libraries.py")

pytestmark = pytest.mark.long


def run(folder: Path, *arguments: object) -> tuple[int, str]:
    """The exit status, and what was said."""
    environ = {**os.environ, PREEMPT_ENV: "requeue", RUN_DIR_ENV: str(folder / "run")}
    ran = subprocess.run(
        [sys.executable, SCRIPT, folder, *map(str, arguments)], env=environ,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
    )  # fmt: skip
    return ran.returncode, ran.stdout


def test_a_stop_is_heard_whoever_has_taken_the_signal(tmp_path: Path) -> None:
    """faulthandler before us, a module in Composer's shape that is imported late, SIG_DFL in the
    middle, handlers that are saved and put back, transformers' JIT checkpoint: a stop saves, a
    pause never kills, within the trainings and between them; at the end SIGTERM ends the process.
    """
    status, said = run(tmp_path, 3)
    assert status == 75, said
    assert "SIGTERM was given to leave() of composer_like" in said
    status, said = run(tmp_path, 7)
    assert status == 75, said
    assert "enable_jit_checkpoint of transformers stands down" in said
    status, said = run(tmp_path)
    assert status in (-15, 143), said
    assert said.count("alive") == 4
