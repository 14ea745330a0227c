"""The recipe for torchtitan, as the documentation prints it, against a stand-in for torchtitan."""

from __future__ import annotations

import re
from pathlib import Path

from integration.scripts.with_diff import DOCS
from zygote import forked

STAND_IN = Path(__file__).with_name("titan_stand_in.py").read_text()
MODULES = {
    "components/checkpointer/base.py": "from __main__ import BaseCheckpointManager",
    "models/llama3/config_registry.py": "from __main__ import Trainer\n"
    "llama3_debugmodel = Trainer.Config",
}
"""Of torchtitan, which a recipe imports."""


def test_the_recipe(tmp_path: Path) -> None:
    """Stopped at the first step, in the middle and at the last one; finished, it is done."""
    block = re.search(
        r"^```python\n(.*?)^```", (DOCS / "torchtitan.md").read_text(), flags=re.M | re.S
    )
    assert block is not None
    (tmp_path / "preemptible.py").write_text(block[1])
    for name, text in MODULES.items():
        module = tmp_path / "torchtitan" / name
        module.parent.mkdir(parents=True)
        module.write_text(text)

    def attempt(folder: str, stop: int, *, done: bool = False) -> tuple[int, list[str]]:
        with forked(STAND_IN, tmp_path, str(tmp_path / folder), str(stop)) as program:
            code = program.wait()
            if stop:
                program.expect(f"loss {stop}")
            elif not done:
                program.expect("weights")
            return code, [one for one in program.lines if one.startswith(("loss", "weights"))]

    code, alone = attempt("alone", 0)
    assert (code, len(alone)) == (0, 6)
    said: list[str] = []
    for stop in (1, 3, 5):
        code, lines = attempt("stopped", stop)
        assert code == 75
        said += lines
    code, lines = attempt("stopped", 0)
    assert code == 0
    assert said + lines == alone
    assert attempt("stopped", 0, done=True) == (0, [])
