"""A training that hangs in its first attempt, at a place of one's choice, and trains in the next.

python stalling.py FRAMEWORK PLACE OUTPUT [--workers N] [--devices N --nodes N]

PLACE: sanity (Lightning's check), loader (the twelfth sample that is asked for), last (behind the
last step, within fit()); behind fit(): between (that one and a second one, which there is with no
other place), test, predict. Rank 0 hangs, and the others wait for it.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("framework", choices=("lightning", "own"))
parser.add_argument("place")
parser.add_argument("output", type=Path)
for name, default in (("workers", 0), ("devices", 1), ("nodes", 1)):
    parser.add_argument(f"--{name}", type=int, default=default)
options = parser.parse_args()
options.output.mkdir(parents=True, exist_ok=True)
FORWARDS = options.output / "forwards"
RANK = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)


def wait_for_parent() -> None:
    """A worker works ahead: until the training waits for it, the stop would still be in time. It
    does so behind the first batch of each worker."""
    waits = 0
    while waits < 25 or not FORWARDS.exists() or FORWARDS.stat().st_size < options.workers:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        waits = waits + 1 if stat.rpartition(")")[2].split()[0] == "S" else 0
        time.sleep(0.02)


def reach(place: str) -> None:
    if place == options.place and RANK == 0:
        try:
            (options.output / "reached").touch(exist_ok=False)  # by one worker of several
        except FileExistsError:
            return
        if multiprocessing.parent_process() is not None:
            wait_for_parent()
        (options.output / "hangs").touch()
        time.sleep(3600)


class Points(Dataset):
    def __init__(self, place: str = "") -> None:
        self.points = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
        self.place, self.asked = place, 0

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.asked += 1
        if self.asked > 12:
            reach(self.place)
        point = self.points[index]
        return {"points": point + 0.1 * torch.randn(6), "labels": (point.sum() > 0).long()}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)
        )

    def forward(self, points: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if RANK == 0 and options.workers:
            with FORWARDS.open("ab") as file:
                file.write(b".")
        logits = self.layers(points)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def with_lightning(net: Net) -> None:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch, batch_idx):
            return self.net(**batch)["loss"]

        def validation_step(self, batch, batch_idx):
            if self.trainer.sanity_checking:
                reach("sanity")

        def test_step(self, batch, batch_idx):
            reach("test")

        def predict_step(self, batch, batch_idx):
            reach("predict")

        def on_train_end(self):
            reach("last")

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 0.01)

    module, others = Module(), DataLoader(Points(), batch_size=8)
    for _ in range(FITS):
        trainer = L.Trainer(
            accelerator="cpu", devices=options.devices, num_nodes=options.nodes, max_epochs=2,
            strategy="ddp" if options.devices * options.nodes > 1 else "auto", logger=False,
            default_root_dir=options.output, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader(), others)
        reach("between")
    trainer.test(module, others, verbose=False)
    trainer.predict(module, others, return_predictions=False)


def with_own(net: Net) -> None:
    import hydroslurm

    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    with hydroslurm.Run(model=net, optimizer=optimizer, loader=loader()) as run:
        run.resume()
        for batch in run.batches(epochs=2):
            optimizer.zero_grad()
            net(**batch)["loss"].backward()
            optimizer.step()
        reach("last")
    reach("test")


def loader() -> DataLoader:
    return DataLoader(Points("loader"), batch_size=8, shuffle=True, num_workers=options.workers)


FITS = 2 if options.place == "between" else 1
torch.set_num_threads(1)
torch.manual_seed(3)
net = Net()
globals()[f"with_{options.framework}"](net)
if RANK == 0:
    weights = b"".join(one.detach().numpy().tobytes() for one in net.state_dict().values())
    (options.output / "result").write_text(hashlib.sha256(weights).hexdigest())
