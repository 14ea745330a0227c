"""What a Trainer made preemptible does at the edges: ``transformers_edges.py FOLDER``. Prints, as
JSON, name -> exit statuses and notes; what was said is on stderr.

torch and transformers are imported once; each attempt is a fork of that.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from attempts import STOPPED, attempts
from transformers import Trainer
from transformers_scenes import Noisy, attempt, made_trainer, train

from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.integrations.transformers import install, make_preemptible


def older_or_newer(name: str, folder: Path, stop: str) -> None:
    """transformers without a method that hydroslurm uses, as one is before it came and after it has
    gone: asked for, and by the import hook."""
    kind = type("AnotherTrainer", (Trainer,), {})
    trainer = made_trainer(kind, Noisy(), folder / "output", {}, [])
    own = transformers.trainer.skip_first_batches
    del transformers.trainer.skip_first_batches
    before = dict(vars(trainer))
    try:
        make_preemptible(trainer)
    except UsageError as error:
        note(folder, f"asked: {error}")
    note(folder, f"as it was: {dict(vars(trainer)) == before}")
    os.environ["HYDROSLURM_RUN_DIR"] = str(folder / "run")
    install(transformers.trainer)
    try:
        trainer.train()
    except UsageError as error:
        note(folder, f"unasked: {error}")
    note(folder, f"as it was: {dict(vars(trainer)) == before}")
    transformers.trainer.skip_first_batches = own
    note(folder, f"trained {trainer.train().global_step}")


def another_model(name: str, folder: Path, stop: str) -> None:
    """The second attempt has a wider one."""
    torch.set_num_threads(1)
    try:
        train("plain", folder, stop, width=8 if stop else 16)
    except StateMismatch as error:
        note(folder, f"refused: {error}")


def trained_longer(name: str, folder: Path, stop: str) -> None:
    """The first attempt comes to its end, the second one is told to train longer."""
    torch.set_num_threads(1)
    until = int(stop or {"num_train_epochs": 3, "max_steps": 10}[name])
    train("plain", folder, "", options={name: until, "lr_scheduler_type": "constant"})
    if stop:
        raise SystemExit(STOPPED)


def whole_process(name: str, folder: Path, stop: str) -> None:
    """With what Python does at its end, where a run is marked as finished."""
    attempt(name, folder, stop)
    atexit._run_exitfuncs()


def note(folder: Path, what: str) -> None:
    with (folder / "notes").open("a") as notes:
        print(" ".join(what.split()), file=notes)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {
        "another transformers": attempts(older_or_newer, "", folder / "version", [""]),
        "another model": attempts(another_model, "", folder / "model", ["step:3", ""]),
        "finished": attempts(whole_process, "plain", folder / "finished", [""]),
        "finished again": attempts(whole_process, "plain", folder / "finished", [""]),
    }
    for kind, short in (("num_train_epochs", "2"), ("max_steps", "5")):
        for run, stops in (("longer", [short, ""]), ("whole", [""])):
            place = folder / kind / run
            found[f"{kind}, {run}"] = attempts(trained_longer, kind, place, stops)
    for name, stops in (
        ("own checkpoint", ["step:9", "epoch:2"]),
        ("two trainers", ["1/step:4", "2/step:3"]),
    ):
        found[name] = attempts(attempt, name, folder / name / "stopped", [*stops, ""])
        found[f"{name}, undisturbed"] = attempts(attempt, name, folder / name / "whole", [""])
    name = "own checkpoint, bare"
    found[name] = attempts(attempt, name, folder / name, [""])
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
