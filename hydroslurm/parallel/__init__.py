"""Data-parallel training through host memory: gradients are summed in a node before they travel.

Knows PyTorch's DistributedDataParallel, and nothing of Slurm but which ranks are on one node.
"""

from __future__ import annotations

from hydroslurm.parallel.ddp import DistributedDataParallel, host_reduce_hook

__all__ = ["DistributedDataParallel", "host_reduce_hook"]
