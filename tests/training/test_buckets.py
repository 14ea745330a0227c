"""A model without an order of buckets that could be kept."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.training.gradients import BucketOrders


def test_a_static_graph_is_told(tmp_path: Path) -> None:
    """DDP remembers more of its first backward than the order, which no checkpoint can bring
    back."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
        model(torch.ones(1, 2)).sum().backward()
        assert BucketOrders(lambda: [model], world_size=3).has_static_graph()
        assert BucketOrders(lambda: [model], world_size=3).state() == []
        assert not BucketOrders(lambda: [model], world_size=2).has_static_graph()
    finally:
        dist.destroy_process_group()
