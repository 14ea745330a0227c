"""How the replicas of a node, which hold the same state as in DDP, get a checkpoint: each reads it,
or one of them does and tells the others.

Interleaved, medians of the rounds, the checkpoint dropped from the page cache before each:

    read_ratio_to_state          what four ranks that load at once read from the disk / the state:
                                 1 if whoever comes second finds it in the page cache
    load_ratio_to_one_rank       how long until the last of four has it / one rank alone
    broadcast_ratio_to_load      the same, where one reads and gives it to the others by gloo /
                                 where each reads
    broadcast_cpu_ratio_to_load  processor time of all four, the same way
    broadcast_warm_s_per_gb      of the broadcast alone, over the loopback device
    load_warm_s_per_gb           of four that load what is in the page cache already
"""

from __future__ import annotations

import os
import resource
import statistics
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from first_save import state_of, tensors_of
from harness import finish, parser, scratch
from save_peers import drop_from_cache

from hydroslurm.checkpoint.store import CheckpointStore

RANKS = 4
_barrier: Barrier


class Cost(NamedTuple):
    """Of one rank; ``broadcast_s`` is a part of ``took_s``."""

    took_s: float
    cpu_s: float
    disk_bytes: int
    broadcast_s: float = 0.0


def main() -> None:
    wanted = parser("How the replicas of a node get a checkpoint.", directory=True)
    wanted.add_argument("--bytes", type=float, default=1e9, help="about so large a state")
    wanted.add_argument("--repeats", type=int, default=3, help="rounds")
    chosen = wanted.parse_args()
    size_bytes, rounds = (16_000_000, 1) if chosen.quick else (int(chosen.bytes), chosen.repeats)
    with scratch("replicas", chosen) as folder:
        state = state_of(size_bytes)
        state_bytes = sum(one.nbytes for one in tensors_of(state.shared))
        CheckpointStore(folder / "store").write(state, step=1, kind="x")
        del state
        seen: dict[str, list[list[Cost]]] = {"one": [], "each": [], "broadcast": [], "warm": []}
        for number in range(rounds):
            for name, costs in seen.items():
                if name != "warm":
                    drop_from_cache(folder / "store")
                meet = folder / f"meet-{number}-{name}"
                costs.append(together(name, folder / "store", meet))
    finish(chosen, "Replicas of a node load:", result_of(seen, state_bytes))


def result_of(seen: dict[str, list[list[Cost]]], state_bytes: int) -> dict[str, Any]:
    last_s = {name: [max(one.took_s for one in of) for of in runs] for name, runs in seen.items()}
    cpu_s = {name: [sum(one.cpu_s for one in of) for of in runs] for name, runs in seen.items()}
    read = [sum(one.disk_bytes for one in of) / state_bytes for of in seen["each"]]
    broadcast_s = [max(one.broadcast_s for one in of) for of in seen["broadcast"]]

    def ratio(values: dict[str, list[float]], arm: str, base: str) -> float:
        pairs = zip(values[arm], values[base], strict=True)
        return statistics.median(a / b for a, b in pairs)

    return {
        "state_bytes": state_bytes,
        "ranks": RANKS,
        "read_ratio_to_state": statistics.median(read),
        "load_ratio_to_one_rank": ratio(last_s, "each", "one"),
        "broadcast_ratio_to_load": ratio(last_s, "broadcast", "each"),
        "broadcast_cpu_ratio_to_load": ratio(cpu_s, "broadcast", "each"),
        "broadcast_warm_s_per_gb": statistics.median(broadcast_s) / (state_bytes / 1e9),
        "load_warm_s_per_gb": statistics.median(last_s["warm"]) / (state_bytes / 1e9),
    }


def together(name: str, store: Path, meet: Path) -> list[Cost]:
    """What each rank pays."""
    ranks = 1 if name == "one" else RANKS
    context = get_context("spawn")
    barrier = context.Barrier(ranks)
    with ProcessPoolExecutor(ranks, context, initializer=_meet_at, initargs=(barrier,)) as pool:
        return list(
            pool.map(
                load, range(ranks), [ranks] * ranks, [name] * ranks, [store] * ranks, [meet] * ranks
            )
        )


def _meet_at(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def load(rank: int, ranks: int, name: str, store: Path, meet: Path) -> Cost:
    """One rank; all of them begin at one moment."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=ranks)
    (checkpoint,) = CheckpointStore(store).committed()
    _barrier.wait()
    begin_s, before_s, before_bytes = time.perf_counter(), _cpu_s(), _disk_bytes()
    broadcast_s = 0.0
    if name != "broadcast":
        tensors = tensors_of(CheckpointStore(store).load(checkpoint).shared)
    else:
        if rank == 0:
            tensors = tensors_of(CheckpointStore(store).load(checkpoint).shared)
        specs: list[Any] = [[(one.shape, one.dtype) for one in tensors] if rank == 0 else None]
        dist.broadcast_object_list(specs)
        if rank != 0:
            tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in specs[0]]
        begun_s = time.perf_counter()
        for one in tensors:
            dist.broadcast(one, src=0)
        broadcast_s = time.perf_counter() - begun_s
    took = Cost(
        time.perf_counter() - begin_s,
        _cpu_s() - before_s,
        _disk_bytes() - before_bytes,
        broadcast_s,
    )
    del tensors
    dist.destroy_process_group()
    return took


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _disk_bytes() -> int:
    """Read by this process from a disk, not from the page cache."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


if __name__ == "__main__":
    main()
