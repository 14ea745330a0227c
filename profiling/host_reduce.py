"""Gradients reduced on the host against gloo's all-reduce, both under PyTorch's
DistributedDataParallel, on two "nodes" of this machine: groups of four processes that share memory
only among themselves.

`step_ratio_to_gloo`: a training step (forward, backward, reduction) with ours to the same step with
gloo's, the median over interleaved rounds in the same processes. Where there is a GPU, all of them
train on it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from harness import finish, interleaved, median_ratio, options, scratch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.parallel import host_reduce_hook

NODES, LOCAL_RANKS = 2, 4
WIDTH, LAYERS = 1024, 8
"""8.4 million parameters: 34 MB of gradients, in several buckets."""


def main() -> None:
    chosen = options(__doc__ or "")
    rounds, steps = (2, 1) if chosen.quick else (9, 2)
    fork = multiprocessing.get_context("fork")
    with scratch("reduce") as folder:
        ours, theirs = fork.Pipe(duplex=False)
        arguments = (folder / "meet", theirs, rounds, steps)
        ranks = [
            fork.Process(target=be_rank, args=(rank, *arguments))
            for rank in range(NODES * LOCAL_RANKS)
        ]
        for rank in ranks:
            rank.start()
        theirs.close()
        try:
            found: dict[str, float] = ours.recv()
        finally:
            for rank in ranks:
                rank.join(60)
                rank.kill()
    finish(chosen, "Gradients reduced on the host, against gloo:", found)


def be_rank(rank: int, meet: Path, answer: Connection, rounds: int, steps: int) -> None:
    torch.set_num_threads(1)
    node, place = divmod(rank, LOCAL_RANKS)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        WORLD_SIZE=str(NODES * LOCAL_RANKS),
        LOCAL_RANK=str(place),
        LOCAL_WORLD_SIZE=str(LOCAL_RANKS),
        GROUP_RANK=str(node),
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=NODES * LOCAL_RANKS
    )
    models = {"gloo": made_model(hook=False), "host": made_model(hook=True)}
    arms = {name: timed_step(model, steps) for name, model in models.items()}
    for step in arms.values():
        step()  # DDP makes its buckets anew after the first step
    for one, other in zip(*(model.parameters() for model in models.values()), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    seen = interleaved(arms, rounds=rounds)
    if rank == 0:
        answer.send({"step_ratio_to_gloo": median_ratio(seen, "host", "gloo")})
    os._exit(0)  # not by way of torch, whose threads may hang at exit


def made_model(*, hook: bool) -> DistributedDataParallel:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(device())
    ddp = DistributedDataParallel(model, bucket_cap_mb=8, gradient_as_bucket_view=True)
    if hook:
        ddp.register_comm_hook(None, host_reduce_hook())
    return ddp


def device() -> torch.device:
    """Asked in the ranks alone: CUDA does not survive a fork."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def timed_step(ddp: DistributedDataParallel, count: int) -> Callable[[], float]:
    """Seconds of a training step without its optimizer, the mean of some."""
    torch.manual_seed(dist.get_rank())
    batch = torch.randn(4, WIDTH, device=device())

    def step() -> None:
        ddp.zero_grad()
        ddp(batch).square().mean().backward()

    def settle() -> None:
        if batch.is_cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def seconds() -> float:
        step()
        settle()
        begin_s = time.perf_counter()
        for _ in range(count):
            step()
        settle()
        return (time.perf_counter() - begin_s) / count

    return seconds


if __name__ == "__main__":
    main()
