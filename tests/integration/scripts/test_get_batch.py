"""A script with a ``get_batch()``, after the change that the documentation shows, is stopped and
resumed bit for bit."""

from __future__ import annotations

import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forkedranks import start, wait_for_end
from integration.scripts.with_diff import DOCS, changed
from processes import Child, child

from hydroslurm.prove.trial import Proof

SCRIPT = Path(__file__).with_name("get_batch.py").read_text()
PAGE = "own-loop.md"
RANKS = f"import sys; sys.path[:0] = {[str(DOCS.parent / 'tests')]!r}\n" + (
    "from integration.scripts.test_get_batch import be_rank\n"
    "from forkedranks import serve\n"
    "serve(be_rank)\n"
)


def test_the_change_is_small() -> None:
    """Eight lines at most, those that go counted too."""
    diff = re.search(r"^```diff\n(.*?)^```", (DOCS / PAGE).read_text(), flags=re.M | re.S)
    assert diff is not None
    assert sum(line[:1] in ("+", "-") for line in diff[1].splitlines()) <= 8


def test_changed_it_is_resumed(
    preemptible_training: Callable[..., Proof], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, accumulation, evaluations in the loop, and batches drawn from a memory-mapped
    file."""
    script = tmp_path / "train.py"
    script.write_text(changed(SCRIPT, PAGE))
    monkeypatch.chdir(tmp_path)
    proof = preemptible_training(str(script), steps=10, stops=1, seed=4)
    assert (proof.steps, len(proof.stops)) == (10, 1)


def test_ranks_of_ddp_stop_at_one_step(tmp_path: Path) -> None:
    """SIGTERM for rank 1 alone: both leave behind the same step, and go on with the same losses."""
    (tmp_path / "train.py").write_text(changed(SCRIPT, PAGE))
    with child(RANKS, tmp_path) as program:
        program.expect("ready")
        alone = _attempt(program, tmp_path / "alone")
        first = _attempt(program, tmp_path / "stopped", stop_at=3)
        second = _attempt(program, tmp_path / "stopped")
    codes = (alone[0], first[0], second[0])
    assert codes == ({0: 0, 1: 0}, {0: 75, 1: 75}, {0: 0, 1: 0}), str(program)
    assert len(first[1]) < len(alone[1])
    assert first[1] + second[1] == alone[1]


def _attempt(
    program: Child, folder: Path, *, stop_at: int = -1
) -> tuple[dict[int, int], list[str]]:
    """The exit statuses of two ranks, and the losses that rank 0 has printed."""
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    seen = len(program.lines)
    pids = start(
        program,
        2,
        meet=f"meet-{seen}",
        port=port,
        folder=str(folder),
        script=str(folder.parent / "train.py"),
        stop_at=stop_at,
    )
    assert len(pids) == 2
    codes = wait_for_end(program, 2)
    return codes, [line for line in program.lines[seen:] if line.startswith("iter ")]


def be_rank(options: dict[str, Any], rank: int) -> None:
    """What a forked rank does: the script, which stops itself where that is wanted."""
    import hydroslurm

    os.environ["MASTER_PORT"] = options["port"]
    place = options["folder"]
    sys.argv = [options["script"], f"out_dir={place}/out", f"data_dir={place}/data"]
    complete = hydroslurm.Run.safe_point

    def safe_point(run: hydroslurm.Run) -> None:
        if rank == 1 and run._step == options["stop_at"]:
            os.kill(os.getpid(), signal.SIGTERM)
        complete(run)

    hydroslurm.Run.safe_point = safe_point  # type: ignore[method-assign]
    runpy.run_path(options["script"], run_name="__main__")
