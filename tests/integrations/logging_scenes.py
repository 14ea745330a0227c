"""One logical run in the loggers: ``logging_scenes.py FRAMEWORK FOLDER STOP...``. Prints what the
loggers have of the attempts, beside an undisturbed run's, as JSON.

A stop is ``stop:N``, SIGTERM to the rank and to all processes below it behind the N-th step of the
run, as Slurm sends it, ``kill:N``, SIGKILL to all of them, or ``fail:N``, an exception.
"""

from __future__ import annotations

import atexit
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
STEPS = 16
"""Of the loops that are not a framework's."""
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_CONSOLE="off")
os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", HF_MLFLOW_LOG_ARTIFACTS="false")
STATUSES = ("", "RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")
"""MLflow's, by their numbers in its files."""


def reach(stop: str, step: int) -> None:
    """Send the signal behind its step."""
    how, _, number = stop.partition(":")
    if str(step) == number and how == "fail":
        raise ValueError("of the script")
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
    torch.set_num_threads(1)
    made = lightning.Trainer(
        accelerator="cpu", max_epochs=EPOCHS, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        logger=[
            loggers.TensorBoardLogger(folder / "tb"),
            loggers.CSVLogger(folder / "csv"),
            loggers.WandbLogger(project="p", save_dir=folder),
            # a new experiment would draw from Python's random numbers, more or fewer by chance
            loggers.MLFlowLogger("Default", tracking_uri=f"file:{folder}/mlruns"),
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
    os.environ.update(MLFLOW_TRACKING_URI=f"file:{folder}/mlruns")
    transformers.set_seed(3)
    torch.set_num_threads(1)
    options = {"logging_steps": 1, "report_to": ["tensorboard", "wandb", "mlflow"]}
    trainer = made_trainer(
        transformers.Trainer, Noisy(ITEMS), folder / "output", options, [Stopped()]
    )
    make_preemptible(trainer, directory=folder / "run", every_s=0, every_steps=EVERY_STEPS).train()


def own_attempt(name: str, folder: Path, stop: str) -> None:
    import mlflow
    import wandb

    import hydroslurm

    torch.manual_seed(3)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hydroslurm.Run(
        model=model, optimizer=optimizer, directory=folder / "run", every_steps=EVERY_STEPS
    ) as run:
        wandb.init(project="p", dir=folder)
        mlflow.set_tracking_uri(f"file:{folder}/mlruns")
        mlflow.start_run()
        for step in run.steps(STEPS):
            train_step(model, optimizer, step)
            wandb.log({"loss": step / 7})
            mlflow.log_metric("loss", step / 7, step=step)
            reach(stop, step + 1)


def accelerate_attempt(name: str, folder: Path, stop: str) -> None:
    from accelerate import Accelerator

    from hydroslurm.integrations.accelerate import completed_steps, epochs, prepare

    os.environ.update(WANDB_DIR=str(folder), MLFLOW_TRACKING_URI=f"file:{folder}/mlruns")
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, log_with=["wandb", "mlflow"])
    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.DataLoader(torch.arange(float(STEPS)), batch_size=1)
    model, optimizer, loader = prepare(
        accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1), data,
        directory=folder / "run", every_steps=EVERY_STEPS,
    )  # fmt: skip
    accelerator.init_trackers("p", config={"lr": 0.1})
    for _ in epochs(accelerator, 1):
        for batch in loader:
            step = completed_steps(accelerator)
            train_step(model, optimizer, int(batch))
            accelerator.log({"loss": step / 7}, step=step)
            reach(stop, step + 1)
    accelerator.end_training()


def train_step(model: Any, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(torch.full((1, 4), float(step % 3))).sum().backward()
    optimizer.step()


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
        "wandb ends": [wandb_end(path) for path in files],
        "mlflow": [mlflow_metrics(path.parent) for path in mlflow_runs(folder)],
        "mlflow ends": (folder / "statuses").read_text().split(),
    }


def mlflow_runs(folder: Path) -> list[Path]:
    return sorted(folder.glob("mlruns/[!.]*/*/meta.yaml"))


def mlflow_metrics(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each row of each metric, without what tells the time."""
    timed = ("runtime", "per_second")
    return {
        path.name: [
            (int(step), float(value))
            for _, value, step, *_ in map(str.split, path.read_text().splitlines())
        ]
        for path in sorted((run / "metrics").iterdir())
        if not path.name.endswith(timed)
    }


def note_statuses(folder: Path) -> None:
    """In the next attempt, which finds what the one before has left."""
    with (folder / "statuses").open("a") as file:
        for path in mlflow_runs(folder):
            number = path.read_text().split("\nstatus: ")[1].split("\n")[0]
            print(STATUSES[int(number)], file=file)


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
    """Row number -> values."""
    rows = {}
    for record in wandb_records(path):
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


def wandb_end(path: Path) -> str:
    """How an attempt ended: "" if it was killed, its exit status, and whether it was preempted."""
    found = list(wandb_records(path))
    marked = "preempted " * any(one.HasField("preempting") for one in found)
    return marked + "".join(str(one.exit.exit_code) for one in found if one.HasField("exit"))


def wandb_records(path: Path) -> Iterator[Any]:
    """Of a file that is to be synced later: a log of records in the manner of LevelDB's, in blocks
    of 32 KiB, behind 7 bytes that say which kind of file it is."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
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
            yield record


def main(framework: str, folder: Path, *stops: str) -> None:
    warnings.filterwarnings("ignore")
    train = {
        "lightning": lightning_attempt, "transformers": transformers_attempt,
        "accelerate": accelerate_attempt, "own": own_attempt,
    }[framework]  # fmt: skip

    def attempt(name: str, place: Path, stop: str) -> None:
        note_statuses(place)
        try:
            train(name, place, stop)
        finally:
            atexit._run_exitfuncs()  # a fork of ours leaves without

    found: dict[str, Any] = {}
    for run, told in (("undisturbed", ("",)), ("stopped", (*stops, ""))):
        place = folder / run
        place.mkdir(parents=True)
        (place / "notes").touch()
        exits, _ = attempts(attempt, framework, place, told)
        note_statuses(place)
        found[run] = {"exits": exits, **logged(place)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
