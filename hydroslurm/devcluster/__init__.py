"""A real Slurm with several nodes on one machine, for experiments and tests only.

munged, MariaDB, slurmdbd, slurmctld and one slurmd per node run in one folder and on the loopback
interface, as root or as an ordinary user. **Never for production**: one key, one user, no limits,
and everything is deleted at the end.

    with DevCluster.up(ClusterSpec(nodes=2, profile="pause")) as cluster:
        cluster.run(["sbatch", "job.sh"])
"""

from __future__ import annotations

from hydroslurm.devcluster.cluster import ClusterStatus, DaemonStatus, DevCluster, NodeStatus
from hydroslurm.devcluster.spec import ClusterSpec

__all__ = ["ClusterSpec", "ClusterStatus", "DaemonStatus", "DevCluster", "NodeStatus"]
