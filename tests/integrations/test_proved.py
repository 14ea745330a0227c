"""Scripts of people who know nothing of hydroslurm, put to the proof by ``hydroslurm prove``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hydroslurm.prove.trial import Proof

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
