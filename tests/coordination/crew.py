"""What the forked ranks of a test train. Options, beside those of forkedranks.py:

directory, out: of the run, and where rank 0 writes what it has come to.
epochs: of 4 steps; every rank takes its share of a batch of 12.
hold: {"rank": r, "at": place} - that rank waits there until there is a file ``go``
    in the run folder; a place is "step 7" or "end".
kind: "run", "job", or "own" for a loop that saves by itself. back_to: the epoch that a job goes
    back to.
forward_s: of each rank, sleeps in its forward. model: "ddp", "ddp-buffers", which begins each
    forward with a broadcast, or "fsdp". vacate: tests/vacate/model.py and its folder, for "run".
every_steps, every_s: of the Run. timeout_s: of collectives.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forkedranks import serve
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hydroslurm
from hydroslurm.data import ResumableSampler


class Diary:
    """The losses and samples of one rank, one line per step, over all attempts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, loss: float, samples: list[int]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, loss.hex(), samples]) + "\n")


def wait_here(options: dict[str, Any], rank: int, place: str) -> None:
    """Hold, where the options say so."""
    wish = options.get("hold")
    if wish and wish["rank"] in (rank, "all") and wish["at"] == place:
        os.write(1, f"rank {rank} at {place}\n".encode())
        while not (Path(options["directory"]) / "go").exists():
            os.sched_yield()


class Parts:
    """What the kinds of programs have in common: model, optimizer, loader and diary of one rank."""

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        world = options["world"]
        self.options, self.rank = options, rank
        torch.manual_seed(7)
        data = TensorDataset(torch.randn(48, 6), torch.arange(48))
        sampler = ResumableSampler(data, seed=3)
        self.loader = DataLoader(data, batch_size=12 // world, sampler=sampler)
        model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 3))
        if forward_s := options.get("forward_s"):
            model.register_forward_pre_hook(lambda *_: time.sleep(forward_s[rank]))
        torch.manual_seed(100 + rank)
        self.model = distributed(model, options.get("model", "ddp"), world)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.diary = Diary(Path(options["directory"]) / f"diary-{rank}")

    def step(self, number: int, inputs: torch.Tensor, samples: torch.Tensor) -> None:
        """Train one batch, and write it down."""
        self.optimizer.zero_grad()
        loss = self.model(inputs).square().mean()
        loss.backward()
        self.optimizer.step()
        self.diary.write(number, loss.item(), samples.tolist())
        wait_here(self.options, self.rank, f"step {number}")

    def tell(self, step: int) -> None:
        """Write what it has come to; a collective."""
        told = result(self.model, self.optimizer, step)
        if self.rank == 0:
            Path(self.options["out"]).write_text(told)
        wait_here(self.options, self.rank, "end")


def distributed(model: nn.Module, kind: str, world: int) -> nn.Module:
    if kind == "ddp-buffers":
        model = nn.Sequential(nn.BatchNorm1d(6), model)
    if kind.startswith("ddp"):
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def use_model(command: list[str]) -> None:
    """Each rank has a device: that of tests/vacate/model.py."""
    from hydroslurm.vacate.communicators import Communicators
    from hydroslurm.vacate.cuda_checkpoint import CONTEXT_BYTES, CudaCheckpoint

    hydroslurm.controller().vacating.open_device = lambda: CudaCheckpoint(
        used_bytes=lambda: 10**9 - CONTEXT_BYTES,
        devices=1,
        communicators=Communicators(),
        command=[sys.executable, *command],
    )


def with_run(parts: Parts) -> None:
    """The loop over a Run."""
    options = parts.options
    run = hydroslurm.Run(
        model=parts.model,
        optimizer=parts.optimizer,
        loader=parts.loader,
        directory=options["directory"],
        every_steps=options.get("every_steps", 0),
        every_s=options.get("every_s", 0),
    )
    with run:
        run.resume()
        if "vacate" in options:
            use_model(options["vacate"])
        for inputs, samples in run.batches(epochs=options.get("epochs", 3)):
            parts.step(run.step, inputs, samples)
        parts.tell(run.step)


def with_job(parts: Parts) -> None:
    """The same as a Job, with a stop signal that only the first rank hears."""
    options = parts.options
    job = hydroslurm.Job("several")

    @job.build
    def build() -> None:
        job.save("model", parts.model)
        job.save("optimizer", parts.optimizer)
        job.loader = parts.loader

    @job.epoch
    def train(job: Any) -> None:
        for inputs, samples in job.run.epoch_batches():
            parts.step(job.run.step, inputs, samples)

    @job.exit
    def tell(job: Any) -> None:
        parts.tell(job.run.step)

    @job.add_stop_signal
    def enough(job: Any) -> bool:
        return parts.rank == 0 and job.run.epoch >= options.get("epochs", 3)

    manager = hydroslurm.MultiNodeCheckpointManager(options["directory"], every_steps=0, every_s=0)
    runner = hydroslurm.JobRunner(job, manager, resume_from_epoch=options.get("back_to"))
    print(f"epochs {runner.run()}", flush=True)


def with_own_saves(parts: Parts) -> None:
    """HFAI's two calls, and a checkpoint of the loop's own, written by rank 0."""
    options = parts.options
    path = Path(options["directory"]) / "own.pt"
    hydroslurm.receive_suspend_command()
    parts.model.eval()  # no dropout: it saves no random numbers
    step = 0
    if path.exists():
        saved = torch.load(path, weights_only=True)
        parts.model.load_state_dict(saved["model"])
        parts.optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < 12:
        parts.step(step, torch.full((4, 6), float(step)), torch.tensor([step]))
        step += 1
        if hydroslurm.receive_suspend_command():
            state = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
            if parts.rank == 0:
                torch.save({**state, "step": step}, path)
            dist.barrier()
            hydroslurm.go_suspend()
    parts.tell(step)


KINDS = {"run": with_run, "job": with_job, "own": with_own_saves}


def train(options: dict[str, Any], rank: int) -> None:
    """One rank, from its process group on."""
    Path(options["directory"]).mkdir(parents=True, exist_ok=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{options['meet']}",
        rank=rank,
        world_size=options["world"],
        timeout=datetime.timedelta(seconds=options.get("timeout_s", 60)),
    )
    KINDS[options.get("kind", "run")](Parts(options, rank))


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


if __name__ == "__main__":
    serve(train)
