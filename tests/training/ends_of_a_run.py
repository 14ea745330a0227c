"""Attempts at a small run, each a fork of this process that ends as a script would: started by
test_ending.py, which says on stdin in which folder, and how."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch
from forkedranks import serve_scripts

import hydroslurm


def train(folder: Path, *, steps: int = 3) -> hydroslurm.Run:
    model = torch.nn.Linear(1, 1)
    with hydroslurm.Run(model=model, directory=folder, every_steps=0) as run:
        run.resume()
        while run.step < steps:
            with torch.no_grad():
                model.weight += 1
            run.step += 1
            print("trained", run.step, flush=True)
            run.safe_point()
        print("weight", f"{model.weight.item() - run.step:.3f}", flush=True)
    return run


def in_child(folder: Path, how: str) -> None:
    train(folder / "first")
    if how != "child, well":
        raise ZeroDivisionError


def attempt(where: str, how: str) -> None:
    folder = Path(where)
    torch.manual_seed(0)
    if how == "stopped in the second":
        train(folder / "first")
        run = hydroslurm.Run(model=torch.nn.Linear(1, 1), directory=folder / "second")
        run.resume()
        run.request_stop()
        while True:
            run.check_stop()
    if how.startswith("child"):
        ends = multiprocessing.get_context("fork").Process(target=in_child, args=(folder, how))
        ends.start()
        ends.join()
        sys.exit(ends.exitcode)
    train(folder / "first")
    print("behind", flush=True)
    if how == "two in one folder":
        train(folder / "first")
    elif how == "two folders":
        train(folder / "second")
    elif how == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    elif how == "error":
        raise ZeroDivisionError
    elif how == "status":
        sys.exit(3)
    else:
        assert how == "well", how
        sys.exit(0)


if __name__ == "__main__":
    serve_scripts(attempt)
