"""DDP's buckets are the same in every attempt, so that a restart changes no bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Child
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from zygote import forked

from hydroslurm.training.ddp_buckets import BucketOrders, is_settled

PROGRAM = Path(__file__).with_name("ranks_with_buckets.py")
STEPS = 6


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process from which the ranks are forked."""
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with forked(PROGRAM.read_text(), tmp_path_factory.mktemp("forker"), environ=environ) as program:
        program.expect("ready")
        yield program


def trained(forker: Child, folder: Path, *stops: int, world: int, **options: Any) -> list[str]:
    """Train with a new attempt after each stop; a hash of everything, for each rank."""
    folder.mkdir()
    edges = [0, *stops, STEPS]
    for attempt, (first, last) in enumerate(itertools.pairwise(edges)):
        given = {"folder": str(folder), "attempt": attempt, "first": first, "last": last}
        forker.say(json.dumps({**given, "world": world, **options}))
        assert forker.expect("ended") == str([0] * world), str(forker)
    return [(folder / f"hash-{rank}").read_text() for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "ddp"),
    [
        (3, {}),
        (4, {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        (3, {"find_unused_parameters": True}),
    ],
)
def test_a_restart_changes_no_bit(
    forker: Child, tmp_path: Path, world: int, ddp: dict[str, Any]
) -> None:
    """Weights, optimizer, BatchNorm's statistics and random numbers, on every rank."""
    options: dict[str, Any] = {"world": world, "settle": True, "ddp": ddp}
    alone = trained(forker, tmp_path / "alone", **options)
    assert trained(forker, tmp_path / "restarted", 1, 4, **options) == alone


def test_without_it_a_restart_changes_bits(forker: Child, tmp_path: Path) -> None:
    """What it is for, and that these tests would see it."""
    options: dict[str, Any] = {"world": 3, "settle": False}
    alone = trained(forker, tmp_path / "alone", **options)
    assert trained(forker, tmp_path / "restarted", 3, **options) != alone


def test_two_ranks_need_it_not(forker: Child, tmp_path: Path) -> None:
    """A sum of two is the same in any order."""
    options: dict[str, Any] = {"world": 2, "settle": False}
    alone = trained(forker, tmp_path / "alone", **options)
    assert trained(forker, tmp_path / "restarted", 3, **options) == alone


def test_other_models_are_left_alone() -> None:
    """Without DDP there are no buckets, nor anything to save or to say."""
    model = nn.Linear(2, 2)
    orders = BucketOrders(lambda: [model, None], world_size=3)
    assert is_settled(model) is None
    assert orders.state() == []
    orders.load([])
    assert not orders.has_static_graph()


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
