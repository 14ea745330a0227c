"""ClusterSpec: what it refuses, and that it travels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hydroslurm.devcluster import ClusterSpec
from hydroslurm.errors import UsageError


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 0}, "nodes is 0; it must be a whole number from 1 to 64"),
        ({"nodes": True}, "nodes is True"),
        ({"cpus_per_node": 1.5}, "cpus_per_node is 1.5"),
        ({"profile": "kill"}, "profile is 'kill'; it must be one of pause, requeue, gang-requeue"),
        ({"kill_wait_s": 0}, "kill_wait_s is 0"),
        ({"grace_s": -1}, "grace_s is -1"),
    ],
)
def test_a_wrong_value_is_refused_with_the_right_ones(values: dict[str, Any], words: str) -> None:
    """A spec is checked when it is made, and the message names what would do."""
    with pytest.raises(UsageError, match=words):
        ClusterSpec(**values)


def test_spec_survives_json() -> None:
    """What is written down is read back as the same value."""
    spec = ClusterSpec(nodes=2, profile="requeue", directory=Path("/a b/c"), grace_s=7)
    assert ClusterSpec.from_dict(spec.to_dict()) == spec
    assert ClusterSpec.from_dict(ClusterSpec().to_dict()) == ClusterSpec()
