"""A cluster that is up: what its configuration promises, and what it says of itself."""

from __future__ import annotations

import pytest
from clusters import Part
from processes import wait_until

from hydroslurm.devcluster import DevCluster, config
from hydroslurm.errors import ClusterError

pytestmark = pytest.mark.slurm


def test_jobs_run_on_several_nodes_and_are_accounted(pause_cluster: Part) -> None:
    """An srun over all nodes reaches each of them, and sacct knows its end, account and cluster."""
    nodes = len(pause_cluster.nodes)
    done = pause_cluster.run(["srun", f"-N{nodes}", f"-n{nodes}", "printenv", "SLURMD_NODENAME"])
    assert sorted(done.stdout.split()) == list(pause_cluster.nodes)
    columns = ["sacct", "-X", "-n", "-P", "-o", "State,NNodes,Cluster"]
    wait_until(
        lambda: f"COMPLETED|{nodes}|hydroslurm-dev" in pause_cluster.run(columns).stdout,
        "the job in sacct",
    )


def test_it_listens_on_the_loopback_interface_only(pause_cluster: Part) -> None:
    """All ports of the cluster listen, none of them beyond the loopback interface."""
    text = pause_cluster.slurm_conf.read_text()
    words = text.replace("\n", " ").split(" ")
    numbers = [int(w.partition("=")[2]) for w in words if w.partition("=")[0].endswith("Port")]
    assert len(numbers) == 2 + pause_cluster.spec.nodes
    assert all(config.listening(port) for port in numbers)
    assert config.open_to_others(numbers) == []


def test_status_shows_daemons_and_nodes(pause_cluster: Part) -> None:
    """Every daemon is alive and every node is up, also for somebody who attaches later."""
    for cluster in (pause_cluster, DevCluster.attach(pause_cluster.directory)):
        status = cluster.status()
        names = ["munged", "mariadbd", "slurmdbd", "slurmctld"]
        names += [f"slurmd-{node}" for node in pause_cluster.spec.node_names]
        assert [d.name for d in status.daemons] == names
        assert all(d.alive for d in status.daemons)
        assert [n.name for n in status.nodes] == list(pause_cluster.spec.node_names)


def test_a_program_that_fails_says_why(pause_cluster: Part) -> None:
    """Slurm's own words are in the error, a program that hangs is ended, a missing one is named."""
    with pytest.raises(ClusterError, match=r"`scontrol show job 987654` .*Invalid job id"):
        pause_cluster.run(["scontrol", "show", "job", "987654"])
    with pytest.raises(ClusterError, match=r"`sleep 60` took longer than 0\.2 s"):
        pause_cluster.run(["sleep", "60"], timeout_s=0.2)
    with pytest.raises(ClusterError, match="`no-such-program` could not be run"):
        pause_cluster.run(["no-such-program"])
    assert pause_cluster.run(["false"], check=False).returncode == 1
