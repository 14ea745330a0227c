"""What a preemptible fit of Lightning's does at the edges: ``lightning_edges.py FOLDER EDGE...``.
Prints, as JSON, name -> exit statuses and what was shown; what was said is on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import lightning
import torch
from attempts import STOPPED, attempts, begin, printed
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning_scenes import Module, fit, loader, quiet, scene

from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.integrations.lightning import Preemptible
from hydroslurm.runtime.autoload import PREEMPT_ENV


def older_or_newer(name: str, folder: Path, stop: str) -> None:
    """Lightning without a method that hydroslurm uses, as one is before it came and after it has
    gone: asked for, and by the entry point."""
    own = _TrainingEpochLoop.advance
    for asked in (True, False):
        trainer = made_trainer(folder, asked=asked)
        before = parts(trainer)
        del _TrainingEpochLoop.advance
        try:
            trainer.fit(Module(), loader(), loader())
        except UsageError as error:
            note(folder, f"{'asked' if asked else 'unasked'}: {error}")
        finally:
            _TrainingEpochLoop.advance = own
        note(folder, f"as it was: {parts(trainer) == before}")
    trainer.fit(Module(), loader(), loader())
    note(folder, f"trained {trainer.global_step}")


def parts(trainer: Any) -> list[dict[str, Any]]:
    """The functions that have been put on the objects whose methods are replaced in a fit."""
    loop = trainer.fit_loop
    owners = (loop, loop.epoch_loop, loop.epoch_loop.val_loop, trainer.strategy)
    connectors = (trainer._signal_connector, trainer._checkpoint_connector)
    return [
        {name: one for name, one in vars(owner).items() if isinstance(one, FunctionType)}
        for owner in (*owners, *connectors)
    ]


def made_trainer(folder: Path, *, asked: bool) -> Any:
    os.environ.update({PREEMPT_ENV: "off" if asked else "requeue"})
    os.environ["HYDROSLURM_RUN_DIR"] = str(folder / "run")
    return lightning.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Preemptible(directory=folder / "asked")] if asked else [],
    )  # fmt: skip


def another_model(name: str, folder: Path, stop: str) -> None:
    """The second attempt has a wider one."""
    begin(folder, stop)
    lightning.seed_everything(3, verbose=False)
    module = Module()
    if not stop:
        module.net[3] = torch.nn.Linear(8, 2)
    try:
        fit(module, loader(), {})
    except StateMismatch as error:
        note(folder, f"refused: {error}")


def trained_longer(name: str, folder: Path, stop: str) -> None:
    """The first attempt comes to its end, the second one is told to train longer."""
    begin(folder, "")
    lightning.seed_everything(3, verbose=False)
    kind, _, by = name.partition(" ")
    module, data, options = scene(kind)
    until = int(stop or {"max_epochs": 3, "max_steps": 22}[by])
    fit(module, data, {**options, "max_epochs": -1, by: until})
    if stop:
        raise SystemExit(STOPPED)


def note(folder: Path, what: str) -> None:
    with (folder / "out-0").open("a") as notes:
        print("=", " ".join(what.split()), file=notes)


Edge = tuple[Callable[[str, Path, str], None], str, list[str]]
EDGES: dict[str, Edge] = {
    "another lightning": (older_or_newer, "", []),
    "another model": (another_model, "", ["step:4"]),
    "more epochs": (trained_longer, "plain max_epochs", ["1"]),
    "more epochs, no length": (trained_longer, "stream max_epochs", ["1"]),
    "more steps": (trained_longer, "plain max_steps", ["15"]),
}


def main(folder: Path, *names: str) -> None:
    quiet()
    found: dict[str, Any] = {}
    for name in names:
        call, scene, stops = EDGES[name]
        for run, told in ((name, [*stops, ""]), (f"{name}, undisturbed", [""])):
            exits, lines = attempts(call, scene, folder / run, told, notes="out-*")
            found[run] = exits, printed(lines)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
