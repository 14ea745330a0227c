"""Gradients reduced on the host against gloo's all-reduce, both under PyTorch's
DistributedDataParallel, on two "nodes" of this machine: groups of processes that share memory only
among themselves.

`step_ratio_to_gloo`: a training step (forward, backward, reduction) with ours to the same step with
gloo's, the median over interleaved rounds in the same processes; `_bf16_wire`: with bfloat16
between nodes. `network_bytes_ratio`: what arrives at a node from the other one in a step, counted
by the kernel for each connection, to the same with gloo's, where the ranks of a node follow each
other; `_cyclic`: where they do not (`srun --distribution=cyclic`). `socket_bytes_ratio`: all that
arrives through sockets, those inside a node included, which gloo uses there as well. By the number
of ranks per node; the figures without one are of four.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import finish, interleaved, median_ratio, options
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hydroslurm.parallel import host_reduce_hook, library

NODES = 2
WIDTH, LAYERS = 1024, 8
"""8.4 million parameters: 34 MB of gradients, in several buckets."""
_BYTES_RECEIVED = 128
"""In linux/tcp.h's tcp_info."""

Step = Callable[[], None]


def main() -> None:
    chosen = options(__doc__ or "")
    library.load()
    rounds, steps = (2, 1) if chosen.quick else (9, 2)
    result: dict[str, Any] = {"gradient_mb": 4e-6 * sum(p.numel() for p in model().parameters())}
    for local in (2,) if chosen.quick else (2, 4):
        found = together(local, rounds=rounds, steps=steps, cyclic=False)
        turned = together(local, rounds=0, steps=1, cyclic=True)
        result |= {f"{key}_{local}_local_ranks": value for key, value in found.items()}
        ratio = turned["network_bytes_ratio"]
        result[f"network_bytes_ratio_cyclic_{local}_local_ranks"] = ratio
    for key in ("step_ratio_to_gloo", "network_bytes_ratio"):
        result[key] = result[f"{key}_{local}_local_ranks"]
    finish(chosen, "Gradients reduced on the host, against gloo:", result)


def together(local: int, *, rounds: int, steps: int, cyclic: bool) -> dict[str, float]:
    """Fork the ranks of one measurement, and have what rank 0 finds."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="hydroslurm-reduce-") as folder:
        ours, theirs = fork.Pipe(duplex=False)
        ranks = [
            fork.Process(
                target=be_rank,
                args=(rank, local, Path(folder) / "meet", theirs, rounds, steps, cyclic),
            )
            for rank in range(NODES * local)
        ]
        for one in ranks:
            one.start()
        theirs.close()
        try:
            found: dict[str, float] = ours.recv()
        finally:
            for one in ranks:
                one.join(60)
                one.kill()
    return found


def be_rank(
    rank: int, local: int, meet: Path, answer: Connection, rounds: int, steps: int, cyclic: bool
) -> None:
    torch.set_num_threads(1)
    node, place = (rank % NODES, rank // NODES) if cyclic else divmod(rank, local)
    os.environ.update(
        GLOO_SOCKET_IFNAME="lo",
        RANK=str(rank),
        WORLD_SIZE=str(NODES * local),
        LOCAL_RANK=str(place),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(node),
    )
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=NODES * local
    )
    arms = {
        "gloo": step_of(None),
        "host": step_of({}),
        "host_bf16_wire": step_of({"wire": torch.bfloat16}),
    }
    for step in arms.values():
        for _ in range(3):  # DDP makes its buckets anew after the first
            step()
    crossing, all_bytes = {}, {}
    for name, step in arms.items():
        crossing[name], all_bytes[name] = received_by(step, node)
    found = {
        "network_bytes_ratio": crossing["host"] / crossing["gloo"],
        "network_bytes_ratio_bf16_wire": crossing["host_bf16_wire"] / crossing["gloo"],
        "socket_bytes_ratio": all_bytes["host"] / all_bytes["gloo"],
        "network_mb_gloo": crossing["gloo"] / 1e6,
        "network_mb_host": crossing["host"] / 1e6,
    }
    if rounds:
        seen = interleaved({name: timed(step, steps) for name, step in arms.items()}, rounds=rounds)
        found |= {
            "step_ratio_to_gloo": median_ratio(seen, "host", "gloo"),
            "step_ratio_to_gloo_bf16_wire": median_ratio(seen, "host_bf16_wire", "gloo"),
            "step_ms_gloo": 1e3 * statistics.median(seen["gloo"]),
            "step_ms_host": 1e3 * statistics.median(seen["host"]),
        }
    dist.barrier()
    if rank == 0:
        answer.send(found)
    os._exit(0)  # not by way of torch, whose threads may hang at exit


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def step_of(hook: dict[str, Any] | None) -> Step:
    """A training step without its optimizer."""
    ddp = DistributedDataParallel(model(), bucket_cap_mb=8, gradient_as_bucket_view=True)
    if hook is not None:
        ddp.register_comm_hook(None, host_reduce_hook(**hook))
    batch = torch.randn(4, WIDTH)

    def step() -> None:
        ddp(batch).square().mean().backward()

    return step


def timed(step: Step, steps: int) -> Callable[[], float]:
    def seconds() -> float:
        step()
        dist.barrier()
        begin_s = time.perf_counter()
        for _ in range(steps):
            step()
        dist.barrier()
        return (time.perf_counter() - begin_s) / steps

    return seconds


def received_by(step: Step, node: int) -> tuple[float, float]:
    """Bytes that arrive in one step at all ranks: from other nodes, and through all sockets."""
    before = connections()
    dist.barrier()
    step()
    dist.barrier()
    time.sleep(0.1)
    mine = {key: count - before.get(key, 0) for key, count in connections().items()}
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (node, mine))
    node_of = {here: number for number, found in told for here, _ in found}
    crossing = sum(
        count
        for number, found in told
        for (_, there), count in found.items()
        if node_of.get(there, number) != number
    )
    return crossing, sum(count for _, found in told for count in found.values())


def connections() -> dict[tuple[Any, Any], int]:
    """Both addresses of each TCP connection of this process -> the bytes that it has received."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers are wanted
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            key = (one.getsockname()[:2], one.getpeername()[:2])
            found[key] = struct.unpack_from("=Q", info, _BYTES_RECEIVED)[0]
    return found


if __name__ == "__main__":
    main()
