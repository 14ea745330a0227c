"""A classifier in a loop of one's own with accelerate; what was changed for preemption is marked.

python accelerate_loop.py OUTPUT [--workers N] [--accumulate N] [--items N] [--pause-s S]
"""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from hydroslurm.integrations.accelerate import epochs, prepare  # new


class Points(torch.utils.data.Dataset):
    def __init__(self, count: int) -> None:
        self.points = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = self.points[index]
        return point + 0.1 * torch.randn(6), (point.sum() > 0).long()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    for name, default in (("workers", 0), ("accumulate", 1), ("items", 50), ("pause-s", 0.0)):
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()

    set_seed(5)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(16, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = torch.utils.data.DataLoader(
        Points(options.items), batch_size=4, shuffle=True, num_workers=options.workers
    )
    model, optimizer, loader, scheduler = prepare(accelerator, model, optimizer, loader, scheduler)

    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / f"losses-{accelerator.process_index}").open("a") as losses:
        for epoch in epochs(accelerator, 2):  # was: range(2)
            for points, classes in loader:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.cross_entropy(model(points), classes)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    rate = scheduler.get_last_lr()[0]
                    print(epoch, repr(loss.item()), repr(rate), file=losses, flush=True)
                    print("step", epoch, flush=True)
                time.sleep(options.pause_s)
    weights = b"".join(one.detach().numpy().tobytes() for one in model.state_dict().values())
    if accelerator.is_main_process:
        (options.output / "result.txt").write_text(hashlib.sha256(weights).hexdigest() + "\n")


if __name__ == "__main__":
    main()
