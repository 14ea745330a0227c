"""HFAI's names under either of Lightning's packages: ``lightning_packages.py MODULE...``. Imports
these in their order, and trains with the last of Lightning's. Prints what came of it as JSON."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

OURS = "hydroslurm.compat.hfai"


def train(order: list[str]) -> dict[str, Any]:
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


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps(train(sys.argv[1:])))
