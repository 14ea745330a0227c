"""Who writes what: every tensor once, the same answer on all ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.checkpoint.store import State
from hydroslurm.checkpoint.tree import like_of, tensor_keys
from hydroslurm.checkpoint.write_plan import LEAST_DIVIDED_BYTES, divide, owners

SIZES = st.dictionaries(st.text(max_size=3), st.integers(0, 4 * LEAST_DIVIDED_BYTES))


@given(SIZES, st.integers(1, 8))
def test_owners(sizes: dict[str, int], world_size: int) -> None:
    """Small tensors are rank 0's; of the large ones no rank has more than its share and one."""
    found = owners(sizes, world_size)
    assert found == owners(dict(reversed(sizes.items())), world_size)
    assert set(found) == set(sizes)
    assert all(found[key] == 0 for key in sizes if sizes[key] < LEAST_DIVIDED_BYTES)
    loads = [sum(sizes[key] for key in sizes if found[key] == rank) for rank in range(world_size)]
    assert max(loads) <= sum(loads) / world_size + max(sizes.values(), default=0) + loads[0]


def test_every_tensor_once() -> None:
    """Of what is shared each tensor is one rank's; each rank has its own."""
    large = torch.zeros(LEAST_DIVIDED_BYTES)
    shared = {"m": {"a": large, "b": large.clone(), "tied": large, "small": torch.zeros(2)}}
    portions = [
        divide(State(shared, {"o": torch.ones(1)}), rank=rank, world_size=3) for rank in range(3)
    ]
    assert sorted(piece.key for one in portions for piece in one.pieces) == [
        "rank-00000/o",
        "rank-00001/o",
        "rank-00002/o",
        "shared/m.a",
        "shared/m.b",
        "shared/m.small",
    ]
    assert len({one.digest for one in portions}) == 1
    assert {one.state_bytes for one in portions} == {2 * large.nbytes + 8 + 3 * 4}


def test_templates_of_an_optimizer() -> None:
    """A fresh optimizer's template is its parameters, by the numbers of its state_dict."""
    weight, bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
    adam = torch.optim.Adam([{"params": [weight]}, {"params": [bias]}])
    like = like_of(adam)
    assert list(like["state"]) == [0, 1]
    assert like["state"][1] is bias
    assert like_of(object()) is None
    # no DTensors: everything comes back whole
    found = tensor_keys({"state": {"$dict": [[0, {"x": {"$tensor": "k"}}]]}}, like)
    assert found == {"k": None}
