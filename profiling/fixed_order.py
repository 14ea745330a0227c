"""What a sum of gradients in a fixed order costs, against an all-reduce over the same ranks: four
shards on four ranks and on two, processes of this machine that meet by gloo.

`time_ratio`: the median of interleaved rounds, each the sum of 34 MB of gradients per shard.
`received_ratio`: the bytes that arrive at a rank, counted by the kernel for its connections.
Neither counts that an all-reduce overlaps with the backward, which this sum does not.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from harness import finish, options

from hydroslurm.elastic.fixed_order import sum_in_order
from hydroslurm.elastic.group import _sockets

SHARDS = 4
NUMBERS = 8_400_000
_BYTES_RECEIVED = 128
"""In linux/tcp.h's tcp_info."""


def main() -> None:
    chosen = options(__doc__ or "")
    rounds = 2 if chosen.quick else 9
    result: dict[str, Any] = {"gradient_mb": 4e-6 * NUMBERS, "shards": SHARDS}
    for ranks in (4, 2):
        result |= {f"{key}_{ranks}_ranks": one for key, one in together(ranks, rounds).items()}
    finish(chosen, "Gradients summed in a fixed order, against an all-reduce:", result)


def together(ranks: int, rounds: int) -> dict[str, float]:
    """What rank 0 of so many has measured."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/store"
        all_ranks = [
            context.Process(target=_rank, args=(rank, ranks, rounds, meeting, theirs))
            for rank in range(ranks)
        ]
        for one in all_ranks:
            one.start()
        theirs.close()  # so that ranks that fail leave nobody to wait for
        found: dict[str, float] = ours.recv()
        for one in all_ranks:
            one.join()
    return found


def _rank(rank: int, ranks: int, rounds: int, meeting: str, to: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    before = _sockets()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
    mine = [torch.randn(NUMBERS) for _ in range(rank, SHARDS, ranks)]

    def in_order() -> None:
        sum_in_order(mine, SHARDS, like=mine[0], group=dist.group.WORLD)

    def reduced() -> None:
        total = mine[0].clone()
        for one in mine[1:]:
            total.add_(one)
        dist.all_reduce(total)

    took_s: dict[Any, list[float]] = {in_order: [], reduced: []}
    arrived: dict[Any, int] = {}
    for _ in range(rounds + 1):
        for way in took_s:
            dist.barrier()
            sockets = [descriptor for descriptor, _ in _sockets() - before]
            began_s = time.perf_counter()
            bytes_before = sum(map(_received, sockets))
            way()
            took_s[way].append(time.perf_counter() - began_s)
            arrived[way] = sum(map(_received, sockets)) - bytes_before
    if rank == 0:
        median_s = {way: statistics.median(times[1:]) for way, times in took_s.items()}
        to.send(
            {
                "fixed_order_s": median_s[in_order],
                "all_reduce_s": median_s[reduced],
                "time_ratio": median_s[in_order] / median_s[reduced],
                "received_mb": 1e-6 * arrived[in_order],
                "received_ratio": arrived[in_order] / arrived[reduced],
            }
        )
    dist.barrier()
    dist.destroy_process_group()


def _received(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6):
            return 0
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    return int(struct.unpack_from("Q", info, _BYTES_RECEIVED)[0])


if __name__ == "__main__":
    main()
