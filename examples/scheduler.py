"""A scheduler in a hundred lines: an urgent training preempts one that can wait.

    python examples/scheduler.py

It starts a long training, pauses it when an urgent one comes, and resumes it when that has ended.
The long one keeps its process and its memory, loses no step, and uses no processor while it waits.
On a cluster Slurm does this: `scontrol suspend`, or two partitions (see docs/partitions.md).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from hydroslurm.runtime import client

TRAIN = Path(__file__).resolve().with_name("train.py")


class Training:
    """One examples/train.py in a process of its own."""

    def __init__(self, name: str, folder: Path, *options: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self.result = folder / f"{name}.json"
        command = [sys.executable, "-u", str(TRAIN), "--pausable", "--log-every", "10"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--out", str(self.result), *options],
                env={**os.environ, "HYDROSLURM_RUN_DIR": str(folder / name)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def wait_for_steps(self, *, limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while "\nstep" not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{self.name} does not train:\n{self.log.read_text()}")
            time.sleep(0.01)

    def wait(self, *, limit_s: float = 600) -> str:
        if self.process.wait(limit_s) != 0:
            raise SystemExit(f"{self.name} failed:\n{self.log.read_text()}")
        return f"accuracy {json.loads(self.result.read_text())['accuracy']:.2%}"

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def schedule(folder: Path, *, low_steps: int, urgent_steps: int) -> list[tuple[float, str, str]]:
    """Run both; returns what happened, as (seconds, training, event)."""
    begin, happened = time.monotonic(), []

    def note(training: str, event: str) -> None:
        happened.append((time.monotonic() - begin, training, event))

    low = Training("low", folder, "--iterations", str(low_steps))
    trainings = [low]
    try:
        low.wait_for_steps()
        note("low", "trains")
        note("low", client.pause(low.process.pid).message)  # SIGUSR1, and wait for the answer
        urgent = Training("urgent", folder, "--iterations", str(urgent_steps))
        trainings.append(urgent)
        urgent.wait_for_steps()
        note("urgent", "trains")
        note("urgent", f"ended, {urgent.wait()}")
        note("low", client.resume(low.process.pid).message)  # SIGUSR2
        note("low", f"ended, {low.wait()}")
    finally:
        for training in trainings:
            training.end()
    return happened


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--low-steps", type=int, default=1500, help="of the long training (1500)")
    parser.add_argument("--urgent-steps", type=int, default=500, help="of the urgent one (500)")
    args = parser.parse_args(arguments)
    table = Table("seconds", "training", "what happened")
    with tempfile.TemporaryDirectory(prefix="hydroslurm-scheduler-") as folder:
        for at_s, training, event in schedule(
            Path(folder), low_steps=args.low_steps, urgent_steps=args.urgent_steps
        ):
            table.add_row(f"{at_s:.2f}", training, event)
    Console().print(table)


if __name__ == "__main__":
    main()
