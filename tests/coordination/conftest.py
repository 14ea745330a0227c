"""Fixtures of the tests of several ranks in processes of this machine, without Slurm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from coordination.attempts import PROGRAM, Story
from processes import Child
from zygote import forked_program


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process from which ranks are forked."""
    with forked_program(PROGRAM, tmp_path_factory.mktemp("crew")) as program:
        program.expect("ready")
        yield program


@pytest.fixture
def story(crew: Child, tmp_path: Path) -> Story:
    """A run that has not begun."""
    return Story(crew, tmp_path)
