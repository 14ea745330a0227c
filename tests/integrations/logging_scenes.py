"""One logical run in the loggers: ``logging_scenes.py FRAMEWORK FOLDER STOP...``. Prints what the
loggers have of the attempts, beside an undisturbed run's, as JSON.

A stop is ``stop:N``, SIGTERM to the rank and to all processes below it behind the N-th step of the
run, as Slurm sends it, or ``kill:N``, SIGKILL to all of them.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attempts import attempts

ITEMS, EPOCHS = 32, 2
EVERY_STEPS = 3
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")


def reach(stop: str, step: int) -> None:
    """Send the signal behind its step."""
    how, _, number = stop.partition(":")
    if str(step) == number:
        signo = signal.SIGKILL if how == "kill" else signal.SIGTERM
        for pid in (*below(os.getpid()), os.getpid()):
            os.kill(pid, signo)
        time.sleep(0.1)


def below(pid: int) -> Iterator[int]:
    """All processes below this one, as far as one comes from parent to child."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for word in path.read_text().split():
            yield from below(int(word))
            yield int(word)


def lightning_attempt(name: str, folder: Path, stop: str) -> None:
    import lightning
    from lightning.pytorch import loggers
    from lightning_scenes import Module, Noisy, loader

    from hydroslurm.integrations.lightning import Preemptible

    class Stopped(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            reach(stop, trainer.global_step)

    lightning.seed_everything(3, verbose=False)
    made = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        logger=[
            loggers.TensorBoardLogger(folder / "tb"),
            loggers.CSVLogger(folder / "csv"),
            loggers.WandbLogger(project="p", save_dir=folder),
        ],
        callbacks=[
            Stopped(), Preemptible(directory=folder / "run", every_s=0, every_steps=EVERY_STEPS)
        ],
    )  # fmt: skip
    made.fit(Module(), loader(), torch.utils.data.DataLoader(Noisy().data, 16))


def transformers_attempt(name: str, folder: Path, stop: str) -> None:
    import transformers
    from transformers_scenes import Noisy, made_trainer

    from hydroslurm.integrations.transformers import make_preemptible

    class Stopped(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            reach(stop, state.global_step)

    os.environ.update(WANDB_PROJECT="p", WANDB_DIR=str(folder))
    transformers.set_seed(3)
    torch.set_num_threads(1)
    options = {"logging_steps": 1, "report_to": ["tensorboard", "wandb"]}
    trainer = made_trainer(
        transformers.Trainer, Noisy(ITEMS), folder / "output", options, [Stopped()]
    )
    make_preemptible(trainer, directory=folder / "run", every_s=0, every_steps=EVERY_STEPS).train()


def logged(folder: Path) -> dict[str, Any]:
    """What there is of a run, without what tells the time."""
    boards = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    files = sorted(folder.rglob("offline-run-*/*.wandb"))
    rows: dict[int, Any] = {}
    for path in files:
        rows.update(wandb_rows(path))
    return {
        "csv": [path.read_text() for path in sorted(folder.rglob("metrics.csv"))],
        "tensorboard": [scalars(path) for path in sorted(boards)],
        "wandb": [rows.get(number) for number in range(max(rows, default=-1) + 1)],
        # offline-run-TIME-ID, and -1 behind it where two begin within one second
        "wandb ids": sorted({path.parent.name.split("-")[3] for path in files}),
        "wandb steps": [list(wandb_rows(path)) for path in files],
    }


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    timed = ("runtime", "per_second")
    return {
        tag: [(one.step, one.value) for one in board.Scalars(tag)]
        for tag in board.Tags()["scalars"]
        if not tag.endswith(timed)
    }


def wandb_rows(path: Path) -> dict[int, dict[str, Any]]:
    """Row number -> values, of a file that is to be synced later: a log of records in the manner of
    LevelDB's, in blocks of 32 KiB, behind 7 bytes that say which kind of file it is."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole, rows = path.read_bytes(), 7, b"", {}
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        _, length, kind = struct.unpack("<IHB", data[at : at + 7]) if left >= 7 else (0, 0, 0)
        if kind == 0:  # what is left of a block
            at += left
            continue
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(whole)
            values = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            if values:
                timed = ("_timestamp", "_runtime", "runtime", "per_second")
                rows[int(values.pop("_step"))] = {
                    key: value for key, value in sorted(values.items()) if not key.endswith(timed)
                }
    return rows


def main(framework: str, folder: Path, *stops: str) -> None:
    warnings.filterwarnings("ignore")
    __import__("lightning.pytorch" if framework == "lightning" else "transformers.trainer")
    train = {"lightning": lightning_attempt, "transformers": transformers_attempt}[framework]

    def attempt(name: str, place: Path, stop: str) -> None:
        import wandb

        try:
            train(name, place, stop)
        finally:
            wandb.finish()  # as at the end of a process, which a fork of ours leaves without

    found: dict[str, Any] = {}
    for run, told in (("undisturbed", ("",)), ("stopped", (*stops, ""))):
        place = folder / run
        place.mkdir(parents=True)
        (place / "notes").touch()
        exits, _ = attempts(attempt, framework, place, told)
        found[run] = {"exits": exits, **logged(place)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
