"""Scripts of people who know nothing of hydroslurm, put to the proof by ``hydroslurm prove``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.prove.attempts import Script, runnable
from hydroslurm.prove.trial import Proof, prove

SCRIPTS = Path(__file__).parents[1] / "integration" / "scripts"
DOCS = Path(__file__).parents[2] / "docs"
pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        ("lightning.md", "class Classifier(L.LightningModule)"),
        ("lightning.md", "fabric = Fabric("),
        ("huggingface.md", "trainer = Trainer("),
        ("huggingface.md", "accelerator = Accelerator("),
    ],
)
def test_the_example_of_a_page(
    preemptible_training: Callable[..., Proof], page: str, shown: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """As it is shown, but for the number of devices."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.S | re.M)
    script = next(one for one in blocks if shown in one)
    for name in ("devices", "num_nodes"):
        script = re.sub(rf"\b{name}=\d+", f"{name}=1", script)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    proof = preemptible_training("train.py", steps=12, stops=1)
    assert str(proof).startswith("the same bits: 12 steps, 1 stop")


@pytest.mark.parametrize(
    ("script", "steps", "seed", "what", "cause"),
    [
        # Lightning #21938
        ("own_lightning.py", 22, 3, "which has this place in an earlier epoch", "set_epoch"),
        (  # what transformers saves at SIGTERM
            "own_transformers.py", 16, 1, "random numbers of torch are others when the step begins",
            "saved in the middle of a step, after its forward and before its optimizer step",
        ),
        # accelerate #3996; behind step 5: the save of step 4 is whole, that of step 8 not begun
        ("own_accelerate.py", 14, 13, "in a later epoch", "order of the epoch was drawn again"),
    ],
)  # fmt: skip
def test_what_a_framework_loses_by_itself(
    script: str, steps: int, seed: int, what: str, cause: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With its own checkpoints, and hydroslurm off: the first step that differs, and why."""
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "HYDROSLURM_PREEMPT": "off"}
    own = Script(command=runnable([str(SCRIPTS / script)]), environ=environ)
    proof = prove(own, tmp_path / "prove", steps=steps, stops=1, seed=seed)
    assert not proof.holds
    assert proof.control.is_equal
    assert proof.result is not None
    first = proof.result.differences[0]
    assert first.attempt == 2
    assert what in first.what, str(proof)
    assert cause in first.cause, str(proof)
