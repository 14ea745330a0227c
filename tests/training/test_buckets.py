"""DDP's buckets are the same in every attempt, so that a restart changes no bit."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Child, child
from torch import nn

from hydroslurm.errors import UsageError
from hydroslurm.training import ddp_buckets as buckets
from hydroslurm.training.ddp_buckets import is_settled, warm_up_ddp_buckets

PROGRAM = Path(__file__).with_name("ranks_with_buckets.py")
STEPS = 6


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Child]:
    """The process from which the ranks are forked."""
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with child(PROGRAM.read_text(), tmp_path_factory.mktemp("forker"), environ=environ) as program:
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
    ("world", "settle", "ddp"),
    [
        (3, "batch", {}),
        (4, "function", {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001}),
        (3, "batch", {"static_graph": True}),
        (3, "batch", {"find_unused_parameters": True}),
    ],
)
def test_a_restart_changes_no_bit(
    forker: Child, tmp_path: Path, world: int, settle: str, ddp: dict[str, Any]
) -> None:
    """Weights, optimizer, BatchNorm's statistics and random numbers, on every rank; buckets are
    final at once, and nothing else has changed."""
    options: dict[str, Any] = {"world": world, "settle": settle, "ddp": ddp}
    alone = trained(forker, tmp_path / "alone", **options)
    assert trained(forker, tmp_path / "restarted", 1, 4, **options) == alone


def test_without_it_a_restart_changes_bits(forker: Child, tmp_path: Path) -> None:
    """What it is for, and that these tests would see it."""
    alone = trained(forker, tmp_path / "alone", world=3)
    assert trained(forker, tmp_path / "restarted", 3, world=3) != alone


def test_two_ranks_need_it_not(forker: Child, tmp_path: Path) -> None:
    """A sum of two is the same in any order."""
    alone = trained(forker, tmp_path / "alone", world=2)
    assert trained(forker, tmp_path / "restarted", 3, world=2) == alone


def test_other_models_are_left_alone() -> None:
    """Without DDP there are no buckets, and the batch is not used."""
    model = nn.Linear(2, 2)
    assert is_settled(model) is None
    warm_up_ddp_buckets(model, None)
    assert is_settled(None) is None


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (torch.ones(2, 3), None),
        ((torch.ones(2, 3),), None),
        ({"input": torch.ones(2, 3)}, None),
        (lambda: None, "NoneType that came out holds no tensor"),
        (lambda: {"a": [1, torch.ones(2)]}, "dict that came out"),
    ],
)
def test_what_a_batch_may_be(
    batch: Any, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One argument, several, keywords, or a function; what has no gradient is refused, and
    gradients that were there stay."""
    model = nn.Linear(3, 1)
    monkeypatch.setattr(buckets, "is_settled", lambda _: False)
    model(torch.ones(1, 3)).sum().backward()
    before = [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]
    if words is None:
        warm_up_ddp_buckets(model, batch)
    else:
        with pytest.raises(UsageError, match=words):
            warm_up_ddp_buckets(model, batch)
    after = [parameter.grad for parameter in model.parameters()]
    assert all(map(torch.equal, before, after))
    assert len(before) == 2
