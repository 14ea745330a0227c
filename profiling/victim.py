"""The process that pause_latency.py pauses, and suspend_latency.py suspends: it trains for ever, in
one of two ways, or runs long backwards.

    victim.py hydroslurm|incumbent FOLDER train|backward SECONDS

``train`` prints ``ready`` and trains until it is killed. ``backward`` prints ``begin`` before each
backward of at least SECONDS, and ``end NANOSECONDS`` (CLOCK_MONOTONIC) after it, once per line of
input.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from incumbent import Incumbent
from steps import mlp
from torch import nn

import hydroslurm
from hydroslurm.core.events import Event, EventKind, EventLog
from hydroslurm.core.rundir import RunDir


class Chain(nn.Module):
    """One module of many small operators: its backward is one long call into C++."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(128) * 0.9)
        self.length = 100

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = torch.tanh(x @ self.weight)
        return x


def pausable(way: str, folder: Path, model: nn.Module) -> None:
    """Make this process pausable in the one way or the other."""
    if way == "hydroslurm":
        hydroslurm.install(run_dir=folder, gate="native")
        return
    log = EventLog(RunDir(folder).rank_events(0))

    def write(kind: EventKind, mono_ns: int) -> None:
        log.append(Event(kind, mono_ns, time.time_ns(), pid=os.getpid()))

    Incumbent(model, on_stamp=write).__enter__()


def train(way: str, folder: Path) -> None:
    training = mlp()
    pausable(way, folder, training.model)
    for _ in range(20):
        training.step()
    print("ready", flush=True)
    while True:
        training.step()


def backwards(way: str, folder: Path, seconds: float) -> None:
    chain, data = Chain(), torch.randn(128, 128)
    chain(data).sum().backward()
    output = chain(data).sum()
    begin = time.perf_counter()
    output.backward()
    chain.length = int(1.3 * chain.length * seconds / (time.perf_counter() - begin))
    pausable(way, folder, chain)
    print("ready", flush=True)
    for _ in sys.stdin:
        output = chain(data).sum()
        print("begin", flush=True)
        output.backward()
        print("end", time.monotonic_ns(), flush=True)


def main() -> None:
    way, folder, what, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    if what == "train":
        train(way, folder)
    else:
        backwards(way, folder, seconds)


if __name__ == "__main__":
    main()
