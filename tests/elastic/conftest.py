"""The same tests for each way of forming a generation."""

from __future__ import annotations

import pytest
from elasticstory import ElasticStory

from hydroslurm.elastic.engine import missing


@pytest.fixture(
    params=[
        "in_place",
        pytest.param("reconfigure", marks=pytest.mark.elastic),
        pytest.param("torchft", marks=pytest.mark.elastic),
    ]
)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine of each story of a test."""
    name: str = request.param
    if reason := missing(name, "gloo"):
        pytest.skip(reason)
    monkeypatch.setattr(ElasticStory, "engine", name)
    return name
