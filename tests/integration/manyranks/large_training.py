"""A training whose state is most of its memory: 8 x 17 MB of weights, and three moments of each.

    python large_training.py OUT.json EVERY_STEPS [RUN_FOLDER]

Writes a hash of what it has come to, and how much memory it used before anything was saved.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch
from torch import nn

import hydroslurm

sys.path.append(str(Path(__file__).resolve().parents[3] / "examples"))
from demo_digits import hash_tree

WIDTH = 2048
STEPS = 10


def main(out: Path, every_steps: int, folder: Path | None) -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)))
    # one moment more than Adam: the state is two thirds of all
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, amsgrad=True)
    batches = torch.randn(4 * STEPS, WIDTH).split(4)
    own_bytes = 0
    with hydroslurm.Run(
        model=model, optimizer=optimizer, loader=batches, directory=folder, every_steps=every_steps
    ) as run:
        run.resume()
        for batch in run.batches(epochs=1):
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            own_bytes = own_bytes or used_bytes()
            print(f"epoch 0 step {run.step} loss {loss.item():.6f}", flush=True)
    result = {
        "state": hash_tree([model.state_dict(), optimizer.state_dict()]),
        "last_loss": loss.item().hex(),
        "own_bytes": own_bytes,
    }
    out.write_text(json.dumps(result) + "\n")


def used_bytes() -> int:
    """What this process has for itself: of the libraries others may bear the cost."""
    match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) * 1024


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]) if sys.argv[3:] else None)
