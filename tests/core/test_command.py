"""By what a training is known again."""

from __future__ import annotations

import multiprocessing

import pytest

from hydroslurm.core.command import Command


@pytest.mark.parametrize(
    ("line", "script"),
    [
        ("-u -X dev ./src/train.py --lr 1", "train.py"),
        ("-m pkg.train other.py", "pkg.train"),
        ("-m coverage run train.py", ""),
        ("-m submitit.core._submit /runs/a", ""),
        ("-c print() train.py", ""),
        ("/venv/bin/viztracer train.py", ""),
        ("", ""),
    ],
)
def test_the_script(line: str, script: str) -> None:
    """Of what runs others the name says nothing."""
    assert Command.of(line.split()).script == script


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("t.py --local_rank 0 --lr 1", "t.py --local_rank 7 --lr 1", True),
        ("t.py dist.master-port=29500", "t.py dist.master-port=1", True),
        (
            "t.py --dist-url=tcp://n1:1 --out run-2026-11-26_19-33",
            "t.py --out run-2027-01-02",
            True,
        ),
        ("t.py --resume --lr 1", "t.py --lr 1", True),
        ("t.py --lora-rank 8", "t.py --lora-rank 16", False),
        ("t.py --rank 8", "t.py --rank 16", False),
        ("t.py --lr 1", "t.py --lr 2", False),
        ("t.py --seed 20260", "t.py --seed 20261", False),
    ],
)
def test_what_differs_between_ranks_and_starts(one: str, other: str, same: bool) -> None:
    """It does not make another training; what may be swept does."""
    first, second = Command.of(one.split()), Command.of(other.split())
    assert first.exact != second.exact
    assert (first.stable == second.stable) is same


def test_a_worker_of_multiprocessing_is_of_its_parent() -> None:
    """However it was started."""
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            assert pool.apply(Command.of_this_process) == Command.of_this_process()
