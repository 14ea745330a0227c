"""Fixtures of the session's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child
from training.jobrunner_story import PROGRAM, Story
from zygote import forked_program

import hydroslurm


@pytest.fixture(autouse=True)
def _nothing_stays_installed() -> Iterator[None]:
    """A test that fails must not take the next ones with it."""
    yield
    if hydroslurm.is_installed():
        hydroslurm.uninstall()


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process from which the attempts of jobs are forked."""
    with forked_program(PROGRAM, tmp_path_factory.mktemp("forker")) as program:
        program.expect("ready")
        yield program


@pytest.fixture
def story(forker: Child, tmp_path: Path) -> Story:
    """A run of the job in ``attempts_of_a_job.py`` that has not begun."""
    return Story(forker, tmp_path)


@pytest.fixture(scope="module")
def undisturbed(forker: Child, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the job comes to when it is left alone: a hash of weights, optimizer, losses and random
    numbers."""
    story = Story(forker, tmp_path_factory.mktemp("undisturbed"))
    assert story.live().code == 0
    return story.out.read_text()
