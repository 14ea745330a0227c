"""What a Trainer made preemptible does at the edges: ``transformers_edges.py FOLDER``. Prints, as
JSON, name -> exit statuses and what was shown; what was said is on stderr."""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import transformers
from attempts import STOPPED, attempts, begin, printed
from transformers import Trainer
from transformers_scenes import Noisy, made_trainer, train
from transformers_scenes import main as train_scene

from hydroslurm.errors import StateMismatch, UsageError
from hydroslurm.integrations.transformers import install, make_preemptible
from hydroslurm.prove.updates import PROVE_ENV


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
    begin(folder, stop)
    try:
        train("plain", folder / "output", width=8 if stop else 16)
    except StateMismatch as error:
        note(folder, f"refused: {error}")


def trained_longer(name: str, folder: Path, stop: str) -> None:
    """The first attempt comes to its end, the second one is told to train longer."""
    begin(folder, "")
    until = int(stop or {"num_train_epochs": 3, "max_steps": 10}[name])
    options = {name: until, "lr_scheduler_type": "constant"}
    train("plain", folder / "output", options=options)
    if stop:
        raise SystemExit(STOPPED)


def whole_process(name: str, folder: Path, stop: str) -> None:
    """With what Python does at its end, where a run is marked as finished."""
    begin(folder, stop)
    train_scene(name)
    atexit._run_exitfuncs()


def bare(name: str, folder: Path, stop: str) -> None:
    """As transformers does it without us."""
    os.environ.pop(PROVE_ENV)
    out = os.open(folder / "out-0", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.chdir(folder)
    train_scene(name)


def note(folder: Path, what: str) -> None:
    with (folder / "out-0").open("a") as notes:
        print("=", " ".join(what.split()), file=notes)


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()

    def play(call: Any, name: str, place: Path, stops: list[str]) -> tuple[list[int], list[str]]:
        exits, lines = attempts(call, name, place, stops, notes="out-*")
        return exits, printed(lines)

    found: dict[str, Any] = {
        "another transformers": play(older_or_newer, "", folder / "version", [""]),
        "another model": play(another_model, "", folder / "model", ["step:3", ""]),
        "finished": play(whole_process, "plain", folder / "finished", [""]),
        "finished again": play(whole_process, "plain", folder / "finished", [""]),
        "own checkpoint": play(whole_process, "own checkpoint", folder / "own", [""]),
        "own checkpoint, bare": play(bare, "own checkpoint", folder / "bare", [""]),
    }
    for kind, short in (("num_train_epochs", "2"), ("max_steps", "5")):
        for run, stops in (("longer", [short, ""]), ("whole", [""])):
            found[f"{kind}, {run}"] = play(trained_longer, kind, folder / kind / run, stops)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
