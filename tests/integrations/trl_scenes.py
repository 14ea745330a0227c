"""Trainings with TRL by rewards and preferences, each stopped behind every step and resumed:
``trl_scenes.py ARGUMENTS FOLDER``. Prints what the attempts have noted, beside an undisturbed
run's, as JSON.

The arguments are those of ``trl_rewarded.py``, in one string. torch and TRL are imported once; each
attempt is a fork of that.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from attempts import attempts
from transformers_scenes import Notes

sys.path.insert(0, str(Path(__file__).parents[1] / "integration/scripts"))
import trl_rewarded

from hydroslurm.integrations.transformers import make_preemptible

EVERY = tuple(f"step:{number}" for number in range(1, 100))


def attempt(arguments: str, folder: Path, stop: str) -> None:
    torch.set_num_threads(1)
    options = trl_rewarded.parsed([str(folder / "output"), *arguments.split()])
    transformers.set_seed(11)
    trainer = trl_rewarded.made_trainer(options)
    notes = Notes(folder / "notes", stop)
    trainer.add_callback(notes)
    make_preemptible(trainer, directory=folder / "run", every_s=0, every_steps=0).train()
    notes.note(trl_rewarded.result(trainer))


def main(arguments: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for run, told in (("undisturbed", ("",)), ("stopped", EVERY)):
        found[f"{run}_exits"], found[run] = attempts(attempt, arguments, folder / run, told)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
