"""The process from which ranks are forked that reduce gradients on the host."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forkedranks import start, wait_for_end
from processes import Child
from zygote import forked

PROGRAM = Path(__file__).with_name("crew.py")


@dataclass
class Ranks:
    """One scenario of crew.py that has begun."""

    crew: Child
    world: int
    pids: dict[int, int]
    codes: dict[int, int] = field(default_factory=dict)
    begin: int = 0

    def end(self) -> str:
        """Wait until all ranks have ended; what they said."""
        self.codes = wait_for_end(self.crew, self.world)
        return "\n".join(self.crew.lines[self.begin :])


Begin = Callable[..., Ranks]


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    folder = tmp_path_factory.mktemp("crew")
    tests = str(PROGRAM.parent.parent)
    path = os.pathsep.join([tests, os.environ["PYTHONPATH"]])
    text = f"__file__ = {str(PROGRAM)!r}\n" + PROGRAM.read_text().replace(
        "from __future__ import annotations\n", ""
    )
    with forked(text, folder, environ={"PYTHONPATH": path}) as program:
        program.expect("ready")
        yield program


@pytest.fixture
def begin(crew: Child, tmp_path: Path) -> Begin:
    """Starts a scenario on "nodes" of so many ranks."""
    numbers = itertools.count()

    def start_one(scenario: str, nodes: list[int], **options: Any) -> Ranks:
        lines, world = len(crew.lines), sum(nodes)
        meet = str(tmp_path / f"meet-{next(numbers)}")
        pids = start(crew, world, scenario=scenario, nodes=nodes, meet=meet, **options)
        return Ranks(crew, world, pids, begin=lines)

    return start_one
