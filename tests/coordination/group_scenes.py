"""Scenes of three forked ranks: what torch tells about real gloo groups. Options, beside those of
forkedranks.py: ``scene``, one of the functions below."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forkedranks import serve

from hydroslurm.coordination import collectives

WORLD = 3


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "never so"
        time.sleep(0.001)


def issued() -> dict[str, int]:
    return {key: group.issued for key, group in collectives.groups().items()}


def total(counts: Mapping[str, int]) -> int:
    return sum(counts.values())


def keys_are_the_same_on_all_members(rank: int, meet: str) -> None:
    dist.new_group([0, 1])
    dist.new_group([1, 2])
    dist.new_group([2, 0])
    dist.new_group([rank], use_local_synchronization=True)
    mine = collectives.groups()
    everybody = [None] * WORLD
    dist.all_gather_object(everybody, {key: one.ranks for key, one in mine.items()})
    assert len(mine) == 3, mine
    assert all(rank in one.ranks for one in mine.values())
    merged = {}
    for theirs in everybody:
        for key, ranks in theirs.items():
            assert merged.setdefault(key, ranks) == ranks
    assert sorted(map(sorted, merged.values())) == [[0, 1], [0, 1, 2], [0, 2], [1, 2]], merged
    for key, ranks in merged.items():
        assert [o for o in range(WORLD) if key in everybody[o]] == sorted(ranks)


def every_collective_counts(rank: int, meet: str) -> None:
    x = torch.ones(4)
    parts = [torch.ones(4) for _ in range(WORLD)]
    root = rank == 0
    for work in (
        lambda: dist.all_reduce(x),
        lambda: dist.broadcast(x, 0),
        lambda: dist.barrier(),
        lambda: dist.all_gather(parts, x),
        lambda: dist.all_gather_into_tensor(torch.empty(12), x),
        lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(12)),
        lambda: dist.reduce(x, 0),
        lambda: dist.gather(x, parts if root else None, dst=0),
        lambda: dist.scatter(x, parts if root else None, src=0),
        lambda: dist.all_to_all_single(torch.empty(12), torch.ones(12)),
    ):
        before = total(issued())
        work()
        assert total(issued()) == before + 1
    assert collectives.issued_exact() == issued()
    ((key, number),) = issued().items()
    assert collectives.progress() == collectives.Progress(key, number, 1800.0)
    until(lambda: collectives.in_flight() == 0)


def sends_and_receives_are_taken_out(rank: int, meet: str) -> None:
    x = torch.ones(4)
    pair = dist.new_group([0, 1])
    if rank == 0:
        for _ in range(5):
            dist.send(x, 1)
        dist.send(x, 1, group=pair)
    if rank == 1:
        for _ in range(5):
            dist.recv(x, 0)
        dist.recv(x, 0, group=pair)
    world = next(k for k, g in collectives.groups().items() if len(g.ranks) == WORLD)
    assert issued()[world] == (0 if rank == 2 else 5)
    dist.all_reduce(x)
    if rank == 0:
        dist.send(x, 1)
    if rank == 1:
        dist.recv(x, 0)
    assert issued()[world] == (1 if rank == 2 else 7)
    exact = collectives.issued_exact()
    assert exact[world] == 1, exact
    assert sorted(exact.values()) == ([1] if rank == 2 else [0, 1]), exact


def what_waits_for_a_peer_is_in_flight(rank: int, meet: str) -> None:
    x = torch.ones(4)
    dist.barrier()
    until(lambda: collectives.in_flight() == 0)
    go = [Path(f"{meet}-{peer}") for peer in (1, 2)]
    if rank == 0:
        until(lambda: all(path.exists() for path in go))  # both have looked
        dist.all_reduce(x)
    else:
        work = dist.all_reduce(x, async_op=True)
        assert collectives.in_flight() == 1
        assert total(issued()) == 2
        go[rank - 1].touch()
        work.wait()
    until(lambda: collectives.in_flight() == 0)


def the_recorder_wraps(rank: int, meet: str) -> None:
    x = torch.ones(1)
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
    until(lambda: collectives.in_flight() == 0)
    for _ in range(9):
        dist.all_reduce(x)
        # gloo's threads end them in any order, and the last to end is what a quiet group is told by
        until(lambda: collectives.in_flight() == 0)
    if rank < 2:
        assert collectives.issued_exact() is None, collectives.issued_exact()
        dist.all_reduce(x, group=pair)
    assert collectives.issued_exact() == issued()


def there_is_no_recorder(rank: int, meet: str) -> None:
    assert collectives.in_flight() == 0
    dist.barrier()
    assert total(issued()) == 1
    assert collectives.in_flight() is None
    assert collectives.are_complete() is None
    assert collectives.issued_exact() is None
    assert not collectives.is_alone()


def a_backend_is_not_recorded(rank: int, meet: str) -> None:
    class Other(dist.ProcessGroup):
        def getBackendName(self) -> str:
            return "other"

    dist.Backend.register_backend(
        "other", lambda _, rank, size, __: Other(rank, size), devices=["cpu"]
    )
    dist.new_group([0, 1], backend="other")
    dist.barrier()
    if rank == 2:  # it is in no such group
        until(collectives.are_complete)
    seen = collectives.in_flight(), collectives.are_complete()
    assert seen == ((0, True) if rank == 2 else (None, None)), seen
    dist.barrier()
    os._exit(0)


def a_group_that_was_destroyed_is_forgotten(rank: int, meet: str) -> None:
    for _ in range(4):
        dist.barrier()
    dist.destroy_process_group()
    assert issued() == collectives.groups() == {}
    assert collectives.in_flight() == 0
    dist.init_process_group("gloo", init_method=f"file://{meet}-again", rank=rank, world_size=WORLD)
    dist.barrier()
    assert total(issued()) == 1
    assert total(collectives.issued_exact()) == 1
    until(lambda: collectives.in_flight() == 0)


def be_rank(options: dict[str, Any], rank: int) -> None:
    warnings.simplefilter("ignore")
    assert issued() == {}
    assert collectives.in_flight() == 0
    dist.init_process_group(
        "gloo", init_method=f"file://{options['meet']}", rank=rank, world_size=WORLD
    )
    globals()[options["scene"]](rank, options["meet"])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(be_rank)
