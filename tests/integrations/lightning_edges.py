"""What a fit of Lightning's made preemptible does at the edges: ``lightning_edges.py FOLDER
EDGE...``. Prints, as JSON, name -> exit statuses and notes; what was said is on stderr.

torch and Lightning are imported once; each attempt is a fork of that.
"""

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
from attempts import STOPPED, attempts
from lightning.pytorch.loops import _TrainingEpochLoop
from lightning_scenes import Module, Notes, attempt, fit, loader, quiet, scene

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
    torch.set_num_threads(1)
    lightning.seed_everything(3, verbose=False)
    module = Module()
    if not stop:
        module.net[3] = torch.nn.Linear(8, 2)
    try:
        fit(module, loader(), {}, Notes(folder / "notes", stop), folder)
    except StateMismatch as error:
        note(folder, f"refused: {error}")


def own_checkpoint(name: str, folder: Path, stop: str) -> None:
    """It begins from a checkpoint that Lightning has written in the middle of an epoch."""
    torch.set_num_threads(1)
    lightning.seed_everything(3, verbose=False)
    path = folder / "bare.ckpt"
    options = {"max_steps": 5, "max_epochs": -1, "logger": False, "enable_progress_bar": False}
    if not path.exists():
        bare = lightning.Trainer(accelerator="cpu", enable_checkpointing=False, **options)
        bare.fit(Module(), loader(), loader())
        bare.save_checkpoint(path)
    lightning.seed_everything(4, verbose=False)
    fit(Module(), loader(), {}, Notes(folder / "notes", stop), folder, ckpt_path=path)


def trained_longer(name: str, folder: Path, stop: str) -> None:
    """The first attempt comes to its end, the second one is told to train longer."""
    torch.set_num_threads(1)
    lightning.seed_everything(3, verbose=False)
    kind, _, by = name.partition(" ")
    until = int(stop or {"max_epochs": 3, "max_steps": 22}[by])
    module, data, options = scene(kind)
    options |= {"max_epochs": -1, by: until}
    fit(module, data, options, Notes(folder / "notes", ""), folder)
    if stop:
        raise SystemExit(STOPPED)


def with_transformers(name: str, folder: Path, stop: str) -> None:
    """A fit of Lightning's and a train() of transformers', one after the other."""
    import transformers_scenes

    which, _, at = stop.rpartition("/")
    attempt("plain", folder, at if which == "1" else "")
    transformers_scenes.attempt("plain", folder, at if which == "2" else "")


def note(folder: Path, what: str) -> None:
    with (folder / "notes").open("a") as notes:
        print(" ".join(what.split()), file=notes)


Edge = tuple[Callable[[str, Path, str], None], str, list[str]]
EDGES: dict[str, Edge] = {
    "another lightning": (older_or_newer, "", []),
    "another model": (another_model, "", ["train:3"]),
    "own checkpoint": (own_checkpoint, "", ["train:7", "val:0", "train:20"]),
    "more epochs": (trained_longer, "plain max_epochs", ["1"]),
    "more epochs, no length": (trained_longer, "stream max_epochs", ["1"]),
    "more steps": (trained_longer, "plain max_steps", ["15"]),
    "two fits": (attempt, "twice", ["train:4", "second:3", "second:12"]),
    "two frameworks": (with_transformers, "", ["1/train:4", "2/step:3", "2/eval:2"]),
}


def main(folder: Path, *names: str) -> None:
    quiet()
    found: dict[str, Any] = {}
    for name in names:
        call, scene, stops = EDGES[name]
        found[name] = attempts(call, scene, folder / name / "stopped", [*stops, ""])
        found[f"{name}, undisturbed"] = attempts(call, scene, folder / name / "whole", [""])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
