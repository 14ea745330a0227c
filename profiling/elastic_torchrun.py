"""A worker of torchrun for profiling/elastic.py: the loop of its members, made to be restarted."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
    saved, step = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        net.load_state_dict(state["net"])
        step = state["step"]
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    while step < 1000:
        x = torch.randn(4, 8)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "step": step}, folder / "saving.pt")
            (folder / "saving.pt").replace(saved)
        said = {"step": step, "size": dist.get_world_size(), "at_s": time.monotonic()}
        with (folder / "steps").open("a") as log:
            log.write(json.dumps(said) + "\n")
        time.sleep(float(os.environ["STEP_S"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
