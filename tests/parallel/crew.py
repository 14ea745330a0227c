"""Forked ranks that reduce gradients on the host. Options, beside those of forkedranks.py:

nodes: how many ranks each "node" has; scenario: one of the functions below.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forkedranks import serve
from torch import nn

import hydroslurm
from hydroslurm.parallel import DistributedDataParallel, ddp, host_reduce_hook
from hydroslurm.parallel.node_memory import READY, NodeMemory

KINDS = {torch.float32: 3e-7, torch.float64: 1e-14, torch.bfloat16: 5e-3, torch.float16: 6e-4}
"""How far a gradient may be from the average of the ranks' own, calculated in float64."""


def be_rank(options: dict[str, Any], rank: int) -> None:
    sizes = options["nodes"]
    firsts = [0, *itertools.accumulate(sizes)]
    node = next(number for number in range(len(sizes)) if rank < firsts[number + 1])
    os.environ["GROUP_RANK"] = str(node)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options['meet']}",
        rank=rank,
        world_size=options["world"],
        timeout=timedelta(seconds=options.get("timeout_s", 60)),
    )
    SCENARIOS[options["scenario"]](rank, options)
    print("ok", flush=True)


# --- numbers


def numbers(rank: int, options: dict[str, Any]) -> None:
    """All types, odd sizes, unequal buckets, and DDP's options; what else holds of three ranks."""
    before = held()
    for kind in KINDS:
        compare(rank, kind)
    compare(rank, torch.float32, hook={"piece_elements": 100}, bucket_cap_mb=0.002)
    compare(rank, torch.float32, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    compare(rank, torch.bfloat16, hook={"accumulate": torch.float64}, static_graph=True)
    compare(rank, torch.float16, hook={"wire": torch.float32})
    compare(rank, torch.float32, bound=8e-3, hook={"wire": torch.bfloat16, "piece_elements": 999})
    compare(rank, torch.float32, unused=True, find_unused_parameters=True)
    accumulate_without_sync(rank)
    if dist.get_world_size() == 3:
        places(rank)
        part(rank)
    # models that go take their threads, descriptors and memory with them
    dist.barrier()
    deadline = time.monotonic() + 30
    while (now := held()) != before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)  # threads that were told to end
    assert now == before, (before, now)


class Branches(nn.Module):
    """Odd sizes; with ``unused`` a branch has no gradient in every second step."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(7, 131)
        self.branch = nn.Linear(131, 131)
        self.last = nn.Linear(131, 3)
        self.to(kind)

    def forward(self, batch: torch.Tensor, use: bool) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch))
        return self.last(self.branch(hidden) if use else hidden)


def compare(
    rank: int,
    kind: torch.dtype,
    *,
    hook: dict[str, Any] | None = None,
    unused: bool = False,
    bound: float | None = None,
    **options: Any,
) -> None:
    plain = Branches(kind)
    model = nn.parallel.DistributedDataParallel(copy.deepcopy(plain), **options)
    model.register_comm_hook(None, host_reduce_hook(**(hook or {})))
    for step in range(3):
        use = not (unused and step == 1)
        batch = batch_of(rank, step, kind)
        for one in (model, plain):
            one.zero_grad()
            one(batch, use).square().mean().backward()
        check(model.module, plain, bound or KINDS[kind])


def batch_of(rank: int, step: int, kind: torch.dtype) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + rank)).to(kind)


def check(reduced: nn.Module, own: nn.Module, bound: float) -> None:
    """The same bits on all ranks, and the average of what each rank has calculated by itself."""
    world = dist.get_world_size()
    for name, parameter in reduced.named_parameters():
        mine = own.get_parameter(name).grad
        found = parameter.grad
        if mine is None:
            mine = torch.zeros_like(parameter)
            found = mine if found is None else found
        assert found is not None
        of_all = [torch.empty_like(found) for _ in range(world)]
        dist.all_gather(of_all, found.contiguous())
        assert all(torch.equal(found, other) for other in of_all), name
        wide = [torch.empty_like(mine, dtype=torch.float64) for _ in range(world)]
        dist.all_gather(wide, mine.double())
        exact = torch.stack(wide).mean(0)
        scale = torch.stack(wide).abs().amax().clamp_min(1e-30)
        worst = ((found.double() - exact).abs().amax() / scale).item()
        assert worst <= bound, (name, found.dtype, worst)


def accumulate_without_sync(rank: int) -> None:
    """Gradients of no_sync() are added before they are averaged."""
    plain = Branches(torch.float32)
    model = DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=0.01)
    with model.no_sync():
        model(batch_of(rank, 0, torch.float32), True).sum().backward()
    model(batch_of(rank, 1, torch.float32), True).sum().backward()
    for step in range(2):
        plain(batch_of(rank, step, torch.float32), True).sum().backward()
    check(model.module, plain, 1e-6)


def places(rank: int) -> None:
    """A gradient does not depend on the bucket that it is in, nor on the pieces."""
    found = []
    for cap, pieces in ((25.0, 1 << 20), (0.001, 37)):
        model = nn.parallel.DistributedDataParallel(Branches(torch.float32), bucket_cap_mb=cap)
        model.register_comm_hook(None, host_reduce_hook(piece_elements=pieces))
        for step in range(2):
            model.zero_grad()
            model(batch_of(rank, step, torch.float32), True).square().mean().backward()
        found.append([one.grad for one in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def part(rank: int) -> None:
    """A process group may have some of a node's ranks."""
    group = dist.new_group([0, 2])
    if rank == 1:
        return
    model = DistributedDataParallel(Branches(torch.float64), process_group=group)
    plain = Branches(torch.float64)
    model(batch_of(rank, 0, torch.float64), True).sum().backward()
    for other in (0, 2):
        (plain(batch_of(other, 0, torch.float64), True).sum() / 2).backward()
    for one, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, own.grad)


def ends(rank: int, options: dict[str, Any]) -> None:
    """A rank may end once it has its gradients, before another one of its node has looked."""
    model = DistributedDataParallel(Branches(torch.float32))
    if rank == 1:
        real = NodeMemory.wait

        def late(memory: NodeMemory, slot: int, which: int, own: int, *, limit_s: float) -> bool:
            if which != READY or not limit_s:
                return real(memory, slot, which, own, limit_s=limit_s)
            while not memory.dead():
                time.sleep(0.01)
            return False

        NodeMemory.wait = late  # type: ignore[method-assign]
    model(batch_of(rank, 0, torch.float32), True).sum().backward()


# --- what goes wrong


def dies(rank: int, options: dict[str, Any]) -> None:
    """A rank is killed while the others reduce, or does not come to its backward; they fail with an
    error that says so."""
    model = DistributedDataParallel(Branches(torch.float32), bucket_cap_mb=0.001)
    for step in range(3):  # after that DDP has nothing of its own to send
        model(batch_of(rank, step, torch.float32), True).sum().backward()
    dist.barrier()
    loss = model(batch_of(rank, 0, torch.float32), True).sum()
    noticed = [Path(f"{options['meet']}-{one}") for one in range(options["world"])]
    if rank == options["victim"]:
        if options.get("late"):
            while sum(one.exists() for one in noticed) < options["world"] - 1:
                time.sleep(0.01)
            return
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    began_s = time.monotonic()
    try:
        loss.backward()
    except RuntimeError as error:
        late = time.monotonic() - began_s > options["timeout_s"] and not options.get("late")
        print("too late" if late else "failed:", str(error).replace("\n", " "), flush=True)
        noticed[rank].touch()
        return
    raise AssertionError("nobody noticed")


def refuses(rank: int, options: dict[str, Any]) -> None:
    """Arguments that cannot be, ranks that disagree, gradients that cannot be added."""
    sparse = DistributedDataParallel(nn.Embedding(5, 3, sparse=True))
    for message, call in (
        ("wanted torch.float32 or torch.float64", lambda: host_reduce_hook(accumulate=torch.half)),
        ("wanted one of torch.float32", lambda: host_reduce_hook(wire=torch.int8)),
        ("wanted 1 to", lambda: host_reduce_hook(piece_elements=0)),
        ("do not agree", lambda: host_reduce_hook(piece_elements=100 + rank)),
        ("Sparse gradients", lambda: sparse(torch.tensor([1])).sum().backward()),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()


# --- beside others


def trains(rank: int, options: dict[str, Any]) -> None:
    """Until a file is there, under hydroslurm, with a step printed now and then."""
    hydroslurm.install(run_dir=options["run_dir"])
    model = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), bucket_cap_mb=0.01
    )
    threading.Thread(target=tell_what_is_parked, args=(rank,), daemon=True).start()
    stop = torch.zeros(1)
    for step in itertools.count():
        model(torch.randn(8, 64)).sum().backward()
        model.zero_grad()
        if step % 50 == 0:
            stop.fill_(Path(options["stop"]).exists())
            dist.all_reduce(stop)
            if stop:
                break
        if step % 5 == 0:
            hydroslurm.set_step(step)
            print(f"rank {rank} step {step}", flush=True)
    hydroslurm.uninstall()


def tell_what_is_parked(rank: int) -> None:
    """In each pause, once all ranks are parked: how many reductions were issued, and go on."""
    while True:
        time.sleep(0.02)
        before = reductions()
        time.sleep(0.2)
        if hydroslurm.controller().state.name == "PARKED" and reductions() == before:
            pause = hydroslurm.controller().status().closes
            print(f"pause {pause} rank {rank} at {before}", flush=True)


def reductions() -> int:
    (reducer,) = ddp._reducers.values()
    assert reducer._reduction is not None
    return reducer._reduction.issued * 1000 + reducer._reduction.in_flight


def held() -> tuple[int, int, int]:
    """Threads of ours, maps of our memory, and our sockets and processes' descriptors."""
    threads = sum(one.name.startswith("hydroslurm-") for one in threading.enumerate())
    maps = Path("/proc/self/maps").read_text().count("memfd:hydroslurm")
    unix = Path("/proc/self/net/unix").read_text()
    links = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the listing
            links.append(str(descriptor.readlink()))
    ours = [one for one in links if "pidfd" in one or f" {one[8:-1]} " in unix]
    return threads, maps, len(ours)


SCENARIOS = {one.__name__: one for one in (numbers, ends, dies, refuses, trains)}

if __name__ == "__main__":
    serve(be_rank)
