"""What 4 ranks have saved is loaded by 1, 2, 3 and 4, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import child

PROGRAM = Path(__file__).with_name("shardings.py")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ddp", "fsdp", "uneven", "hsdp", "fsdp_tp"])
def test_with_another_number_of_ranks(quick_folder: Path, case: str) -> None:
    """Model and optimizer come back whole and in shards of any layout, and train on."""
    code = f"import sys; sys.argv[1:] = {[str(quick_folder), case]!r}\n"
    code += f"sys.path.insert(0, {str(PROGRAM.parent.parent)!r})\n"
    code += f"import runpy; runpy.run_path({str(PROGRAM)!r}, run_name='__main__')"
    with child(code, quick_folder, environ={"OMP_NUM_THREADS": "1"}) as running:
        assert running.expect("done", limit_s=240) == "4"
        assert running.wait() == 0
