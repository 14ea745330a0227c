"""A program that saves sharded states with 4 gloo ranks, and loads them with 1 to 4.

``shardings.py FOLDER`` prints "CASE loaded by RANKS" per check, and "done". It loads torch once and
forks. Every rank keeps, beside the checkpoint, what the whole tensors were: loading compares bit
for bit.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint.pipepeers import PipePeers, together
from checkpoint.states import same, write
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hydroslurm.checkpoint import write_plan
from hydroslurm.checkpoint.host_memory import Staging
from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.tree import like_of
from hydroslurm.checkpoint.write_plan import divide

SAVERS = 4
write_plan.LEAST_DIVIDED_BYTES = 32  # the weights are small here


class Net(nn.Module):
    """One linear layer after the other; ``width`` that 4 does not divide makes uneven shards."""

    def __init__(self, width: int, *, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.second = nn.Linear(width, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


Built = tuple[nn.Module, torch.optim.Optimizer]


def ddp(world_size: int) -> Built:
    model = Net(1030, norm=True)
    nn.parallel.DistributedDataParallel(model)  # broadcasts
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def uneven(world_size: int) -> Built:
    """13 rows over 4 ranks, and 2 rows over 4: two ranks have none."""
    model = Net(13)
    model.second = nn.Linear(13, 2)
    return _sharded(model, init_device_mesh("cpu", (world_size,)))


def hsdp(world_size: int) -> Built:
    groups = 2 if world_size % 2 == 0 else 1
    return _sharded(
        Net(30),
        init_device_mesh("cpu", (groups, world_size // groups), mesh_dim_names=("dp", "shard")),
    )


def fsdp_tp(world_size: int) -> Built:
    split = 2 if world_size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (world_size // split, split), mesh_dim_names=("dp", "tp"))
    model = Net(32)
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    return _sharded(parallelize_module(model, mesh["tp"], plan), mesh["dp"])


def _sharded(model: nn.Module, mesh: DeviceMesh) -> Built:
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


CASES: dict[str, Callable[[int], Built]] = {
    one.__name__: one for one in (ddp, uneven, hsdp, fsdp_tp)
}
LOADERS = {"ddp": (1, 3), "uneven": (1, 2, 3, 4), "hsdp": (2, 3), "fsdp_tp": (1, 4)}


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module="torch")  # of torch itself
    if sys.version_info >= (3, 12):
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    # it says that gathering a tensor that is split twice is slow
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.optim.AdamW([torch.ones(1)])  # imports most of what torch has, before the forks
    folder = Path(sys.argv[1])
    for name in CASES:
        assert together(SAVERS, lambda peers: _save(folder, name, peers)) == [0] * SAVERS  # noqa: B023
        for world_size in LOADERS[name]:
            ended = together(world_size, lambda peers: _load(folder, name, peers))  # noqa: B023
            assert ended == [0] * world_size, f"{name} loaded by {world_size}: {ended}"
            print(f"{name} loaded by {world_size}", flush=True)
    print("done", flush=True)


def _save(folder: Path, name: str, peers: PipePeers) -> None:
    _join(folder, f"save-{name}", peers)
    torch.manual_seed(7)
    model, optimizer = CASES[name](peers.world_size)
    torch.manual_seed(peers.rank)
    for _ in range(2):
        inner = model if name != "ddp" else nn.parallel.DistributedDataParallel(model)
        inner(torch.randn(6, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    shared = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    own = {"rank": peers.rank, "noise": torch.full((3,), float(peers.rank))}
    whole = _whole(shared)
    if peers.rank == 0:
        torch.save(whole, folder / f"{name}.pt")
    first = [_local(one).data_ptr() for one in model.first.parameters()]
    state = State(shared, own, frozen=first)
    portion = divide(state, rank=peers.rank, world_size=peers.world_size)
    staged = Staging().copy(portion)
    for tensor in model.parameters():
        nn.init.zeros_(_local(tensor))
    store = CheckpointStore(folder / name, peers=peers)
    write(store, staged, step=2, kind="periodic")
    (written,) = store.committed()
    assert any(part.startswith("frozen-") for part in written.manifest.files)
    _leave()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.data


def _load(folder: Path, name: str, peers: PipePeers) -> None:
    _join(folder, f"load-{name}-{peers.world_size}", peers)
    wanted = torch.load(folder / f"{name}.pt", weights_only=False)
    store = CheckpointStore(folder / name, peers=peers)
    (checkpoint,) = store.committed()
    plain = store.load(checkpoint)
    assert same(dict(plain.shared), wanted), "loaded whole"
    torch.manual_seed(8)
    model, optimizer = CASES[name](peers.world_size)
    like = {"model": like_of(model), "optimizer": like_of(optimizer)}
    state = store.load(checkpoint, like=like)
    assert same(_whole(dict(state.shared)), wanted), "loaded in shards"
    model.load_state_dict(state.shared["model"])
    optimizer.load_state_dict(state.shared["optimizer"])
    for parameter in model.parameters():
        moments = optimizer.state[parameter]
        assert type(moments["exp_avg"]) is type(parameter.data)
        if isinstance(parameter, DTensor):
            assert moments["exp_avg"].placements == parameter.placements
    loaded = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert same(_whole(loaded), wanted), "in the objects"
    for rank in range(SAVERS):
        assert store.load_own(checkpoint, rank)["rank"] == rank
    inner = nn.parallel.DistributedDataParallel(model) if name == "ddp" else model
    inner(torch.randn(6, 16)).square().mean().backward()
    optimizer.step()
    _leave()


def _join(folder: Path, name: str, peers: PipePeers) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/{name}.rendezvous",
        rank=peers.rank,
        world_size=peers.world_size,
    )


def _leave() -> None:
    """End here: freeing a gloo group whose other ranks have ended can hang."""
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _whole(tree: Any) -> Any:
    """The same with every tensor as all ranks together have it; a collective."""
    if isinstance(tree, torch.Tensor):
        whole = tree.full_tensor() if isinstance(tree, DTensor) else tree
        return whole.detach().clone()
    if isinstance(tree, dict):
        copy = type(tree)({key: _whole(one) for key, one in tree.items()})
        if hasattr(tree, "_metadata"):
            copy._metadata = tree._metadata
        return copy
    if isinstance(tree, (list, tuple)):
        return type(tree)(_whole(one) for one in tree)
    return tree


if __name__ == "__main__":
    main()
