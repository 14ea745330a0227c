"""A story that has failed is told again for a test that is run again."""

from __future__ import annotations

from pathlib import Path

import pytest
from stories import stories


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    """The first one who asks gets the failure, the next one another telling, in a new folder; a
    story that is well is told once."""
    told: list[str] = []

    def fails_once(folder: Path) -> str:
        told.append(folder.name)
        assert len(told) > 1, "the first time"
        return folder.name

    stories_of = {"moody": fails_once, "steady": lambda folder: folder.name}
    with stories(stories_of, tmp_path, clusters=(), at_a_time=1) as under_way:
        with pytest.raises(AssertionError, match="the first time"):
            under_way.result("moody", 10.0)
        for _ in range(2):
            assert under_way.result("moody", 10.0) == "moody-2"
            assert under_way.result("steady", 10.0) == "steady"
    assert told == ["moody", "moody-2"]
