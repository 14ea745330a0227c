"""HFAI's names under either of Lightning's packages: ``lightning_packages.py FOLDER``. Imports the
packages and ours in different orders, and trains with the last package. Prints what came of it,
one line of JSON for each order.

torch is imported first, which takes longest; each order is a fork of that.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

OURS = "hydroslurm.compat.hfai"
ORDERS = (
    (OURS, "lightning.pytorch"),
    ("lightning.pytorch", OURS, "pytorch_lightning"),
    ("lightning.pytorch", "pytorch_lightning", OURS),
)


def train(order: tuple[str, ...]) -> dict[str, Any]:
    made: list[Any] = []
    for name in order:
        module = importlib.import_module(name)
        if name == OURS:
            from hydroslurm.integrations.lightning import Preemptible

            environment, preemptible = module.HFAIEnvironment(), Preemptible(directory="runs")
            made, hfai = [environment, preemptible], module
        else:
            package = module
    checkpoint = hfai.ModelCheckpointHF(dirpath="checkpoints")
    again = [pickle.loads(pickle.dumps(each)) for each in (*made, checkpoint)]

    class Line(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.line(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    try:
        package.Trainer(gpus=8, **options)
    except Exception as error:
        gpus = str(error)
    seen: dict[str, Any] = {"gpus": gpus, "steps": []}
    for index, name in enumerate(("ddp_bind_numa", "hfreduce_bind_numa")):
        trainer = package.Trainer(
            strategy=name,
            devices=environment.devices,
            num_nodes=environment.num_nodes,
            plugins=[again[0] if index else environment],
            callbacks=[again[1], again[2]] if index else [preemptible, checkpoint],
            max_steps=4,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(8, 4)))
        seen["steps"].append(trainer.global_step)
        assert isinstance(trainer.strategy, package.strategies.DDPStrategy)
        seen["checkpoints"] = len(trainer.checkpoint_callbacks)
        torch.distributed.destroy_process_group()
    seen["saved"] = Path("runs", "checkpoints").is_dir()
    return seen


def main() -> None:
    warnings.filterwarnings("ignore")
    for order in ORDERS:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
                print(json.dumps(train(order)), flush=True)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
