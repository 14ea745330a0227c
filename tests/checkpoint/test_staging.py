"""The copy of the state: exact, independent, in memory that is kept."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from checkpoint.states import copy_of, plan_of_one, state_bytes
from hypothesis import given
from hypothesis import strategies as st

from hydroslurm.checkpoint.host_memory import Staging
from hydroslurm.checkpoint.store import State
from hydroslurm.checkpoint.write_plan import LEAST_DIVIDED_BYTES, divide, owners

MIB = 1 << 20


def test_memory_is_kept_and_used_again() -> None:
    """What was reserved is all that a copy takes, the second one lies where the first did, and a
    state of a few bytes takes little. Children do not inherit it, so that a fork never makes the
    next copy dear."""
    state = State(shared={"t": {name: torch.randn(99, 3) for name in "abc"}}, own={})
    staging = Staging()
    staging.reserve(plan_of_one(state))
    staging.join()
    held_bytes = staging.reserved_bytes
    assert 0 < held_bytes < MIB
    places = []
    for _ in range(2):
        copied = copy_of(state, staging).shared["t"]
        places.append([one.data_ptr() for one in copied.values()])
        assert staging.reserved_bytes == held_bytes
    assert places[0] == places[1]
    flags = _vm_flags(places[0][0])
    assert "dc" in flags, f"no MADV_DONTFORK on the copy: {flags}"


def test_a_state_may_change() -> None:
    """Tensors that grow, shrink, appear, and are larger than a piece of memory are copied right;
    memory that is kept for a key and a shape serves none of another type or order of dimensions."""
    staging = Staging()
    for tensors in (
        [torch.randn(5), torch.randn(1000)],
        [torch.randn(1000), torch.randn(5), torch.randn(70_000)],
        [torch.randn(0), torch.randn(1), torch.randn(2**20)],
        [],
        [torch.randn(4, 6)],
        [torch.randn(4, 6)],
        [torch.arange(24, dtype=torch.int32).view(4, 6)],
        [torch.randn(6, 4).t()],
    ):
        state = State(shared={"t": tensors}, own={})
        copied = copy_of(state, staging).shared["t"]
        assert len(copied) == len(tensors)
        for one, two in zip(copied, tensors, strict=True):
            assert torch.equal(one, two)
            assert (one.dtype, one.stride()) == (two.dtype, two.stride())
        assert state_bytes(state) == sum(one.nbytes for one in tensors)


def _vm_flags(address: int) -> list[str]:
    found = Path("/proc/self/smaps").read_text()
    for one in re.finditer(r"^(\w+)-(\w+) .*?^VmFlags: (.*?)$", found, re.MULTILINE | re.DOTALL):
        if int(one[1], 16) <= address < int(one[2], 16):
            return one[3].split()
    raise AssertionError("the address is not mapped")


# --- who writes what

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
    state = State(shared, {"o": torch.ones(1)})
    portions = [divide(state, rank=rank, world_size=3) for rank in range(3)]
    own = [f"rank-{rank:05}/o" for rank in range(3)]
    found = sorted(piece.key for one in portions for piece in one.pieces)
    assert found == [*own, "shared/m.a", "shared/m.b", "shared/m.small"]
    assert len({one.digest for one in portions}) == 1
    assert {one.state_bytes for one in portions} == {2 * large.nbytes + 8 + 3 * 4}
