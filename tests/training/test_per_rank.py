"""What each rank registers for itself comes back to that rank, and a new rank gets its share; what
comes back to none is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from forkedranks import start, wait_for_end
from processes import Child
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training.loop import Pole
from zygote import forked

from hydroslurm.training.buckets import STATIC_GRAPH, BucketOrders
from hydroslurm.training.contents import Contents

TESTS = Path(__file__).resolve().parents[1]
RANKS = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}]
from forkedranks import serve
from training.test_per_rank import be_rank
serve(be_rank)
"""


def be_rank(options: dict[str, Any], rank: int) -> None:
    """One attempt of a rank: two steps, then what it has."""
    import hydroslurm

    model = nn.Linear(1, 1)
    pole, noise = Pole(), torch.Generator().manual_seed(100 + rank)
    pole.place = float(rank)
    run = hydroslurm.Run(model=model, directory=options["directory"], every_steps=0)
    run.register("pole", pole, per_rank=True)
    run.register("noise", noise)
    run.resume()
    first = run.step
    for _ in run.steps(first + options["steps"]):
        pole.place += 10
        torch.rand(1, generator=noise)
    drawn = float(torch.rand(1, generator=noise))
    print("has", rank, first, pole.place, drawn.hex(), flush=True)
    run.close()


def attempt(program: Child, folder: Path, world: int, *, steps: int) -> dict[int, list[str]]:
    """Rank -> its first step, its pole's place, and its next random number."""
    seen = len(program.lines)
    start(program, world, meet=f"meet-{seen}", directory=str(folder), steps=steps)
    assert set(wait_for_end(program, world).values()) == {0}, str(program)
    lines = [line.split()[1:] for line in program.lines[seen:] if line.startswith("has ")]
    return {int(rank): rest for rank, *rest in lines}


def test_each_rank_its_own(tmp_path: Path) -> None:
    """Also with another number of ranks, where the new one takes rank 0's object and draws other
    numbers than any."""
    with forked(RANKS, tmp_path) as program:
        program.expect("ready")
        alone = attempt(program, tmp_path / "run", 2, steps=2)
        again = attempt(program, tmp_path / "run", 2, steps=0)
        more = attempt(program, tmp_path / "run", 3, steps=0)
    assert [alone[rank][:2] for rank in (0, 1)] == [["0", "20.0"], ["0", "21.0"]]
    assert [again[rank] for rank in (0, 1)] == [["2", *alone[rank][1:]] for rank in (0, 1)]
    assert [more[rank] for rank in (0, 1)] == [again[rank] for rank in (0, 1)]
    assert more[2][:2] == ["2", "20.0"]
    assert len({more[rank][2] for rank in range(3)}) == 3


def test_a_static_graph_is_told(tmp_path: Path) -> None:
    """DDP remembers more of its first backward than the order, which no checkpoint can bring
    back."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2), static_graph=True)
        model(torch.ones(1, 2)).sum().backward()
        orders = BucketOrders(lambda: {"model": model})
        assert list(orders.findings()) == [STATIC_GRAPH]
        assert orders.state_dict() == []
        groups = [SimpleNamespace(rank=0, world_size=ranks) for ranks in (2, 3)]
        made = [Contents(group, trackers=None).bucket_orders for group in groups]  # type: ignore[arg-type]
        assert [one is None for one in made] == [True, False], "two ranks need no order"
    finally:
        dist.destroy_process_group()
