"""An attempt at a small run that ends as a script would: ``ends_of_a_run.py FOLDER HOW``."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch

import hydroslurm


def train(folder: Path) -> None:
    model = torch.nn.Linear(1, 1)
    with hydroslurm.Run(model=model, directory=folder, every_steps=0) as run:
        run.resume()
        while run.step < 3:
            with torch.no_grad():
                model.weight += 1
            run.step += 1
            print("trained", run.step, flush=True)
            run.safe_point()
        print("weight", f"{model.weight.item() - run.step:.3f}", flush=True)


def in_child(folder: Path, how: str) -> None:
    train(folder)
    if how != "child, well":
        raise ZeroDivisionError


def main(first: Path, second: Path, how: str) -> None:
    torch.manual_seed(0)
    if how.startswith("child"):
        ends = multiprocessing.get_context("fork").Process(target=in_child, args=(first, how))
        ends.start()
        ends.join()
        sys.exit(ends.exitcode)
    train(first)
    print("behind", flush=True)
    if how == "two in one folder":
        train(first)
    elif how == "two folders":
        train(second)
    elif how == "stopped in the second":
        run = hydroslurm.Run(model=torch.nn.Linear(1, 1), directory=second)
        run.resume()
        run.request_stop()
        while True:
            run.check_stop()
    elif how == "signal":  # a pause that comes behind a run kills nobody
        for name in ("USR1", "USR2", "URG", "CONT", "TERM"):
            os.kill(os.getpid(), signal.Signals[f"SIG{name}"])
    elif how == "error":
        raise ZeroDivisionError
    sys.exit(3 if how == "status" else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1], "first"), Path(sys.argv[1], "second"), sys.argv[2])
