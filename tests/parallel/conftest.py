"""The process from which ranks are forked that reduce gradients on the host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordination.attempts import Attempt
from forkedranks import start
from processes import Child
from zygote import forked_program

PROGRAM = Path(__file__).with_name("crew.py")


Begin = Callable[..., Attempt]


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    with forked_program(PROGRAM, tmp_path_factory.mktemp("crew")) as program:
        program.expect("ready")
        yield program


@pytest.fixture
def begin(crew: Child, tmp_path: Path) -> Begin:
    """Starts a scenario on "nodes" of so many ranks."""
    numbers = itertools.count()

    def start_one(scenario: str, nodes: list[int], **options: Any) -> Attempt:
        lines, world = len(crew.lines), sum(nodes)
        meet = str(tmp_path / f"meet-{next(numbers)}")
        pids = start(crew, world, scenario=scenario, nodes=nodes, meet=meet, **options)
        return Attempt(crew, world, pids, begin=lines)

    return start_one
