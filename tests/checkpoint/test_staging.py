"""The copy of the state: exact, independent, in memory that is kept."""

from __future__ import annotations

import os
from typing import Any

import torch
from checkpoint.states import copy_of, plan_of_one, state_bytes

from hydroslurm.checkpoint.staging import Staging
from hydroslurm.checkpoint.store import State


def _state(**own: Any) -> State:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return State(shared=shared, own=own)


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for value in values for tensor in _tensors(value)]


def test_memory_is_kept_and_used_again() -> None:
    """The second copy of the same state allocates nothing and lies where the first did."""
    staging = Staging()
    state = _state()
    first = [tensor.data_ptr() for tensor in _tensors(dict(copy_of(state, staging).shared))]
    held_bytes = staging.reserved_bytes
    second = [tensor.data_ptr() for tensor in _tensors(dict(copy_of(state, staging).shared))]
    assert (first, held_bytes) == (second, staging.reserved_bytes)


def test_reserving_gets_all_the_memory_in_advance() -> None:
    """After reserve() a copy needs no further memory; a state of a few bytes takes little."""
    staging = Staging()
    state = _state()
    staging.reserve(plan_of_one(state))
    staging.join()
    held_bytes = staging.reserved_bytes
    assert 0 < held_bytes < 2**20
    copy_of(state, staging)
    assert staging.reserved_bytes == held_bytes


def test_a_state_may_change_its_shapes() -> None:
    """Tensors that grow, shrink, appear, and are larger than a piece of memory are copied right."""
    staging = Staging()
    for sizes in ((5, 1000), (1000, 5, 70000), (3,), (0, 1, 2**20), ()):
        state = State(shared={"t": [torch.randn(size) for size in sizes]}, own={})
        copied = copy_of(state, staging)
        pairs = zip(state.shared["t"], copied.shared["t"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert state_bytes(state) == 4 * sum(sizes)


def test_a_tensor_may_be_replaced() -> None:
    """Memory that is kept for a key and a shape serves other tensors of that shape, and none of
    another type, order of dimensions or key."""
    staging = Staging()
    for name, tensor in (
        ("x", torch.randn(4, 6)),
        ("x", torch.randn(4, 6)),
        ("x", torch.arange(24, dtype=torch.int32).view(4, 6)),
        ("x", torch.randn(6, 4).t()),
        ("y", torch.randn(6, 4).t()),
    ):
        copied = copy_of(State(shared={"t": {name: tensor}}, own={}), staging).shared["t"]
        assert list(copied) == [name]
        assert torch.equal(copied[name], tensor)
        assert (copied[name].dtype, copied[name].stride()) == (tensor.dtype, tensor.stride())


def test_a_fork_does_not_make_the_next_copy_dear() -> None:
    """Children do not inherit the memory of the copies, so that it is never copy-on-write."""
    staging = Staging()
    state = State(shared={"t": {"x": torch.zeros(2**20)}}, own={})
    copied = copy_of(state, staging).shared["t"]["x"]
    flags = _vm_flags(copied.data_ptr())
    assert "dc" in flags, f"no MADV_DONTFORK on the copy: {flags}"


def _vm_flags(address: int) -> list[str]:
    inside = False
    with open(f"/proc/{os.getpid()}/smaps") as smaps:  # noqa: PTH123 - a path of the kernel
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "VmFlags:":
                return line.split()[1:]
    raise AssertionError("the address is not mapped")
