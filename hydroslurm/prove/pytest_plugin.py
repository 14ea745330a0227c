"""The pytest fixture ``preemptible_training``, available wherever hydroslurm is installed:

def test_resume(preemptible_training):
    preemptible_training("train.py", "--epochs", "2", steps=60, stops=3)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from hydroslurm.prove.trial import Proof


@pytest.fixture
def preemptible_training(tmp_path: Path) -> Callable[..., Proof]:
    """Run a script as ``hydroslurm prove`` does; fail the test if the stopped run differs from the
    undisturbed one. Takes the command's words, and by name ``steps``, ``stops``, ``seed``,
    ``links``, ``preempt`` (``requeue`` or ``off``), ``grace_s`` and ``limit_s``."""
    from hydroslurm.prove.attempts import Script, runnable
    from hydroslurm.prove.trial import prove

    def check(
        *command: str | os.PathLike[str],
        steps: int = 40,
        stops: int = 3,
        seed: int = 0,
        links: tuple[str, ...] = (),
        preempt: str = "requeue",
        grace_s: float = 30.0,
        limit_s: float = 300.0,
    ) -> Proof:
        script = Script(
            command=runnable([os.fspath(word) for word in command]),
            environ={**os.environ, "HYDROSLURM_PREEMPT": preempt},
            links=links,
            grace_s=grace_s,
            limit_s=limit_s,
        )
        proof = prove(script, tmp_path / "prove", steps=steps, stops=stops, seed=seed)
        if not proof.holds:
            pytest.fail(str(proof), pytrace=False)
        return proof

    return check
