"""A program that has torch loaded and forks the ranks of one life of a run at a time.

A line of JSON on stdin starts a life of ``world`` ranks; each rank's ``rank N pid P`` comes back, what they
print, and for each ``rank N ended CODE``. Options:

world, directory, out: how many ranks, where, and where rank 0 writes what it has come to.
steps_per_epoch, epochs, batch: of the whole job; every rank takes its share of ``batch``.
hold: {"rank": r, "at": place} - that rank waits there until it is told to go on with a file of that
    name in the run folder's ``go``; a place is "step 7" or "check 3".
die: the same, and it ends there without a word.
model: "ddp" or "fsdp". every_steps, every_s: of the Run. timeout_s: of collectives.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
import hydroslurm.session.run  # noqa: F401 - loaded before the fork
from hydroslurm.data import ResumableSampler


class Diary:
    """The losses and samples of one rank, one line per step, over all lives."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, loss: float, samples: list[int]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, loss.hex(), samples]) + "\n")


def wait_here(options: dict[str, Any], rank: int, place: str) -> None:
    """Hold or die, where the options say so."""
    for what in ("hold", "die"):
        wish = options.get(what)
        if wish and wish["rank"] in (rank, "all") and wish["at"] == place:
            os.write(1, f"rank {rank} at {place}\n".encode())
            if what == "die":
                os._exit(9)
            while not (Path(options["directory"]) / "go").exists():
                os.sched_yield()


def train(options: dict[str, Any], rank: int) -> None:
    world = options["world"]
    directory = Path(options["directory"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options['meet']}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=options.get("timeout_s", 60)),
    )
    torch.manual_seed(7)
    data = TensorDataset(torch.randn(48, 6), torch.arange(48))
    sampler = ResumableSampler(data, seed=3)
    loader = DataLoader(data, batch_size=options.get("batch", 12) // world, sampler=sampler)
    model: nn.Module = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
    torch.manual_seed(100 + rank)
    if options.get("model", "ddp") == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    if options.get("settle", True):
        hydroslurm.settle_buckets(model, torch.zeros(2, 6))
    diary = Diary(directory / f"diary-{rank}")
    run = hydroslurm.Run(
        model=model,
        optimizer=optimizer,
        loader=loader,
        directory=directory,
        every_steps=options.get("every_steps", 0),
        every_s=options.get("every_s", 0),
    )
    with run:
        run.resume()
        for inputs, samples in run.batches(epochs=options.get("epochs", 3)):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            diary.write(run.step, loss.item(), samples.tolist())
            wait_here(options, rank, f"step {run.step}")
            for check in range(options.get("checks", 0)):
                dist.all_reduce(torch.ones(1))
                wait_here(options, rank, f"check {check} of step {run.step}")
                if check == options.get("checks", 0) - 1:
                    continue
        if rank == 0:
            Path(options["out"]).write_text(result(model, optimizer, run.step))
        else:
            result(model, optimizer, run.step)
        wait_here(options, rank, "end")


def result(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> str:
    """A hash of everything, the same for whole and sharded tensors; a collective."""
    digest = hashlib.sha256(str(step).encode())
    trees = [model.state_dict(), optimizer.state_dict()["state"]]

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            for key in sorted(node, key=str):
                walk(node[key])
        elif isinstance(node, torch.Tensor):
            whole = node.full_tensor() if hasattr(node, "full_tensor") else node
            digest.update(whole.detach().contiguous().numpy().tobytes())

    for tree in trees:
        walk(tree)
    return digest.hexdigest()


def be_rank(options: dict[str, Any], rank: int) -> int:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(options["world"]),
        LOCAL_WORLD_SIZE=str(options["world"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
        TORCHELASTIC_RUN_ID=options["meet"],
    )
    try:
        train(options, rank)
    except SystemExit as leaving:
        return int(leaving.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def live(options: dict[str, Any]) -> None:
    Path(options["directory"]).mkdir(parents=True, exist_ok=True)
    pids = {}
    for rank in range(options["world"]):
        pid = os.fork()
        if pid == 0:
            code = be_rank(options, rank)
            sys.stdout.flush()
            if hydroslurm.is_installed():
                hydroslurm.uninstall()
            os._exit(code)
        pids[pid] = rank
        print(f"rank {rank} pid {pid}", flush=True)
    while pids:
        pid, status = os.wait()
        if pid in pids:
            print(f"rank {pids.pop(pid)} ended {os.waitstatus_to_exitcode(status)}", flush=True)
    print("all ended", flush=True)


def main() -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="hydroslurm")  # what they say is in the output
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.optim.Adam([torch.ones(1)])  # imports most of what torch has
    print("ready", flush=True)
    for line in sys.stdin:
        live(json.loads(line))


if __name__ == "__main__":
    main()
