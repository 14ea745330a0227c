"""What a preemptible training does at the edges: ``edges.py FRAMEWORK FOLDER``. Prints, as JSON,
name -> exit statuses and what was shown."""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from attempts import STOPPED, attempts, begin, printed

from hydroslurm.errors import StateMismatch
from hydroslurm.prove.updates import PROVE_ENV


class Lightning:
    by = ("max_epochs 1 3", "max_steps 15 22")

    def __init__(self) -> None:
        import lightning_scenes

        self.scenes = lightning_scenes
        lightning_scenes.quiet()

    def train(self, *, width: int = 8, **options: Any) -> None:
        import torch

        module, data, own = self.scenes.scene("plain")
        if width > 8:
            module.net[3] = torch.nn.Linear(width, 2)
        own |= {"max_epochs": -1, **options} if options else {}
        self.scenes.fit(module, data, own)


class Transformers:
    by = ("num_train_epochs 2 3", "max_steps 5 10")

    def __init__(self) -> None:
        import transformers_scenes

        self.scenes = transformers_scenes
        transformers_scenes.transformers.logging.set_verbosity_error()

    def train(self, *, width: int = 8, **options: Any) -> None:
        constant = {"lr_scheduler_type": "constant"} if options else {}
        self.scenes.train("plain", Path("output"), width=width, options={**constant, **options})


def note(folder: Path, what: str) -> None:
    with (folder / "out-0").open("a") as notes:
        print("=", " ".join(what.split()), file=notes)


def main(name: str, folder: Path) -> None:
    warnings.filterwarnings("ignore")
    framework: Any = {"lightning": Lightning, "transformers": Transformers}[name]()
    found: dict[str, Any] = {}

    def play(shown: str, call: Any, *stops: str, place: str = "", scene: str = "") -> None:
        exits, lines = attempts(call, scene, folder / (place or shown), stops, notes="out-*")
        found[shown] = exits, printed(lines)

    def another_model(_: str, place: Path, stop: str) -> None:
        """The second attempt has a wider one."""
        begin(place, stop)
        try:
            framework.train(width=8 if stop else 16)
        except StateMismatch as error:
            note(place, f"refused: {error}")

    def whole_process(scene: str, place: Path, stop: str) -> None:
        """With what Python does at its end, where a run is marked as finished."""
        begin(place, stop)
        framework.scenes.main(scene)
        atexit._run_exitfuncs()

    def bare(scene: str, place: Path, stop: str) -> None:
        """As the framework does it without us."""
        os.environ.pop(PROVE_ENV)
        os.dup2(os.open(place / "out-0", os.O_WRONLY | os.O_CREAT), 1)
        os.chdir(place)
        framework.scenes.main(scene)

    play("another model", another_model, "step:3", "")
    for by in framework.by:
        option, short, long = by.split()

        def longer(_: str, place: Path, stop: str, option: str = option, long: str = long) -> None:
            """The first attempt comes to its end, the second one is told to train longer."""
            begin(place, "")
            framework.train(**{option: int(stop or long)})
            if stop:
                raise SystemExit(STOPPED)

        play(option, longer, short, "")
        play(f"{option}, whole", longer, "")
    for shown in ("finished", "finished again"):
        play(shown, whole_process, "", place="finished", scene="plain")
    if name == "transformers":
        for shown, call in (("own checkpoint", whole_process), ("own checkpoint, bare", bare)):
            play(shown, call, "", scene="own checkpoint")
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
