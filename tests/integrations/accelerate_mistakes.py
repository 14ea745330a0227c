"""A loop with accelerate that gives its run all it uses, or all but one thing:
``accelerate_mistakes.py FOLDER``. Prints, as JSON, name -> exit statuses and notes.

accelerate is imported once; each attempt is a fork of that.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from attempts import attempts
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

from hydroslurm.errors import UsageError
from hydroslurm.integrations.accelerate import epochs, prepare

FORGOTTEN = (
    "critic", "critic_optimizer", "scheduler", "later_scheduler", "scaler", "more",
)  # fmt: skip


def attempt(name: str, folder: Path, stop: str) -> None:
    os.environ["HYDROSLURM_RUN_DIR"] = str(folder / "run")
    forgotten, _, unchecked = name.removesuffix(" and stopped").partition(", ")
    with (folder / "notes").open("a") as notes:
        try:
            train(forgotten, notes, stop=stop, options={"check": False} if unchecked else {})
        except UsageError as error:
            print(error, file=notes)
            print(*(path.name for path in (folder / "run/checkpoints").glob("step-*")), file=notes)


def train(forgotten: str, notes: Any, *, stop: str, options: dict[str, Any]) -> None:
    """Two epochs of two steps of two batches; SIGTERM in this step of the attempt."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    data = TensorDataset(torch.randn(8, 2))
    loader, validation = (DataLoader(data, batch_size=2, shuffle=True) for _ in range(2))
    more = itertools.cycle(DataLoader(data))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    ema = torch.optim.swa_utils.AveragedModel(model)
    noise = torch.Generator()

    for_checkpoints = {"scaler": scaler, "ema": ema}
    accelerator.register_for_checkpointing(
        *(thing for name, thing in for_checkpoints.items() if name != forgotten)
    )
    things = {
        "model": model, "critic": critic, "optimizer": optimizer, "noise": noise, "loader": loader,
        "critic_optimizer": critic_optimizer, "scheduler": scheduler, "validation": validation,
    }  # fmt: skip
    if forgotten == "later_scheduler":
        vars(optimizer).pop("step")  # the one that was made before has left its trace
        del things["scheduler"]
    given = [name for name in things if name != forgotten]
    prepared = prepare(accelerator, *(things[name] for name in given), **options)
    things |= dict(zip(given, prepared, strict=True))
    model, optimizer, loader = things["model"], things["optimizer"], things["loader"]
    critic, critic_optimizer = things["critic"], things["critic_optimizer"]
    if forgotten == "later_scheduler":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    step = 0
    for _ in epochs(accelerator, 2):
        for (x,) in tqdm(loader, disable=True):
            x = x + torch.rand(x.shape, generator=noise)
            with accelerator.accumulate(model, critic):
                accelerator.backward(critic(x).square().mean())
                critic_optimizer.step()
                critic_optimizer.zero_grad()
                loss = model(x).square().mean()
                scaler.scale(loss).backward()
                if accelerator.sync_gradients:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
                    scheduler.step()
                    ema.update_parameters(model)
            if forgotten == "more":
                model(next(more)[0])
            with torch.no_grad():
                for (x,) in things["validation"]:
                    model(x)
            if accelerator.sync_gradients:
                step += 1
                rate = optimizer.param_groups[0]["lr"]
                print(loss.item().hex(), rate, ema.module.weight[0, 0].item().hex(), file=notes)
                if str(step) == stop:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(0.1)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    scenes: dict[str, tuple[str, ...]] = dict.fromkeys(FORGOTTEN, ("",))
    stopped = [f"{name} and stopped" for name in ("nothing", "ema", "noise")]
    scenes |= {"nothing": ("",), **dict.fromkeys(stopped, ("1", "2", "")), "ema, unchecked": ("",)}
    found = {
        name: attempts(attempt, name, folder / str(number), stops)
        for number, (name, stops) in enumerate(scenes.items())
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
