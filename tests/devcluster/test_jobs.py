"""A cluster that is up: what its configuration promises, and what it says of itself."""

from __future__ import annotations

import pytest
from clusters import Part

from hydroslurm.devcluster import config
from hydroslurm.errors import ClusterError

pytestmark = pytest.mark.slurm


def test_it_listens_on_the_loopback_interface_only(pause_cluster: Part) -> None:
    """All ports of the cluster listen, none of them beyond the loopback interface."""
    text = pause_cluster.slurm_conf.read_text()
    words = text.replace("\n", " ").split(" ")
    numbers = [int(w.partition("=")[2]) for w in words if w.partition("=")[0].endswith("Port")]
    assert len(numbers) == 2 + pause_cluster.spec.nodes
    assert all(config.listening(port) for port in numbers)
    assert config.open_to_others(numbers) == []


def test_a_program_that_fails_says_why(pause_cluster: Part) -> None:
    """Slurm's own words are in the error, a program that hangs is ended, a missing one is named."""
    with pytest.raises(ClusterError, match=r"`scontrol show job 987654` .*Invalid job id"):
        pause_cluster.run(["scontrol", "show", "job", "987654"])
    with pytest.raises(ClusterError, match=r"`sleep 60` took longer than 0\.2 s"):
        pause_cluster.run(["sleep", "60"], timeout_s=0.2)
    with pytest.raises(ClusterError, match="`no-such-program` could not be run"):
        pause_cluster.run(["no-such-program"])
    assert pause_cluster.run(["false"], check=False).returncode == 1
