"""A real Slurm of several nodes on one machine, for trying and testing only.

munged, MariaDB, slurmdbd, slurmctld and one slurmd per node, as root or as an ordinary user, in one
folder and on the loopback interface. **Never for production**: one key, one user, no limits, and
everything is thrown away at the end.

    with DevCluster.up(ClusterSpec(nodes=2, profile="pause")) as cluster:
        cluster.run(["sbatch", "job.sh"])
"""

from __future__ import annotations

from hydroslurm.devcluster.cluster import ClusterStatus, DaemonStatus, DevCluster, NodeStatus
from hydroslurm.devcluster.spec import ClusterSpec

__all__ = ["ClusterSpec", "ClusterStatus", "DaemonStatus", "DevCluster", "NodeStatus"]
