"""Pause a training from inside its own process: after a delay, for a while, as often as you like.

    python examples/timed_pause.py --after 1 --hold 2 --times 3

The training loop does not know about it. A second thread asks for the pauses; it issues no
operators of torch, so it is not held itself and can resume what it has paused.
"""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

import hydroslurm
from hydroslurm.report.history import read_history
from hydroslurm.report.views import report_view


def main() -> None:
    args = parse_arguments()
    run_dir = args.run_dir or Path("runs") / time.strftime("timed-pause-%Y%m%d-%H%M%S")
    torch.manual_seed(0)
    torch.set_num_threads(1)

    hydroslurm.install(run_dir=run_dir)  # where the events go; without it they go when we end
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    engine = hydroslurm.od_execution_wrapper(model)
    optimizer = torch.optim.SGD(engine.parameters(), lr=0.01)

    pauser = threading.Thread(target=pause_and_resume, args=(engine, args), daemon=True)
    pauser.start()
    steps = train(engine, optimizer, until_done=pauser)
    print(f"trained {steps} steps", flush=True)

    hydroslurm.uninstall()  # writes the last events, and puts the old signal handlers back
    Console().print(report_view(read_history(run_dir)))
    print(f"more of it: hydroslurm report {run_dir}")


def pause_and_resume(engine: hydroslurm.Engine, args: argparse.Namespace) -> None:
    for number in range(1, args.times + 1):
        time.sleep(args.after)
        engine.pause(wait_s=10)  # returns when the training is parked
        print(f"pause {number}: parked, for {args.hold:g} s", flush=True)
        time.sleep(args.hold)
        engine.resume(wait_s=10)
        print(f"pause {number}: running again", flush=True)


def train(
    engine: hydroslurm.Engine, optimizer: torch.optim.Optimizer, *, until_done: threading.Thread
) -> int:
    """Make steps while the other thread lives; returns how many."""
    images, labels = torch.randn(64, 256), torch.randint(0, 10, (64,))
    step = 0
    while until_done.is_alive():
        optimizer.zero_grad()
        nn.functional.cross_entropy(engine(images), labels).backward()
        optimizer.step()
        step += 1
        hydroslurm.set_step(step)  # optional: lets the events say in which step a pause came
    return step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--after", type=float, default=1.0, help="seconds before a pause (1)")
    parser.add_argument("--hold", type=float, default=2.0, help="seconds of a pause (2)")
    parser.add_argument("--times", type=int, default=3, help="number of pauses (3)")
    parser.add_argument("--run-dir", type=Path, help="run folder (runs/timed-pause-DATE-TIME)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
