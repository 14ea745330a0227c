"""What saving and loading cost, beside others' ways.

    stall_ratio_to_memcpy     how long a periodic save holds the training / copying the same tensors
                              into ones that are there already
    stop_to_durable_ms        from the request to stop to the committed checkpoint
    save_ratio_to_best_peer   throughput of ours / that of the best of torch.save,
                              torch.distributed.checkpoint (DCP) and safetensors, each with an fsync
    load_ratio_to_best_peer   the same of a load of the whole state, with a cold page cache

All of it for several sizes of state, whose names end a key: load_ratio_to_best_peer.1gb. Medians
over interleaved rounds, of which the first warms up; before each measurement the disk is synced.
All ways write the same tensors; ours also checksums, fsyncs the folders and commits. Each load is
the first one of a fresh process, as it is when a training resumes: a second one would find memory
that the first one has touched and given back to the allocator.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from harness import finish, interleaved, median_ratio, options, scratch
from torch.utils.data import DataLoader

from hydroslurm.checkpoint.census import Census
from hydroslurm.checkpoint.save import SaveRequest, write_checkpoint
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State

SIZES_BYTES = (1e9, 4e9)
QUICK_BYTES = 16e6
GRACE_S = 600.0

Arm = Callable[[], float]
Shapes = Mapping[str, torch.Size]


def tensors_of(size_bytes: int) -> dict[str, torch.Tensor]:
    """A transformer's parameters with Adam's state: one large tensor, many middling ones, and more
    that are tiny than both together."""
    hidden, words = (512, 16384) if size_bytes > 100e6 else (64, 4096)
    layers = max(1, round((size_bytes / 12 - words * hidden) / (12 * hidden * hidden)))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (words, hidden)}
    for layer in range(layers):
        for name, shape in {
            "attention": (3 * hidden, hidden),
            "out": (hidden, hidden),
            "up": (4 * hidden, hidden),
            "down": (hidden, 4 * hidden),
            "norm1": (hidden,),
            "norm2": (hidden,),
            "bias_up": (4 * hidden,),
            "bias_down": (hidden,),
        }.items():
            shapes[f"layer{layer}.{name}"] = shape
    tensors = {f"model.{name}": torch.randn(shape) for name, shape in shapes.items()}
    for index, shape in enumerate(shapes.values()):
        tensors[f"{index}.step"] = torch.tensor(1.0)
        tensors |= {f"{index}.{name}": torch.randn(shape) for name in ("exp_avg", "exp_avg_sq")}
    return tensors


class OurSaver:
    """What a training waits for, and a stop."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._tensors = list(tensors.values())
        self._state = State({"model": dict(tensors)}, {})
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self._saver = Saver(CheckpointStore(folder))
        self._steps = itertools.count(1)
        self.close = self._saver.close

    def memcpy(self) -> float:
        """Copy every tensor into one that is there."""
        begin = time.perf_counter()
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)
        return time.perf_counter() - begin

    def stall(self) -> float:
        """What a periodic save takes from the training."""
        begin = time.perf_counter()
        self._saver.start(self._state, step=next(self._steps))
        took = time.perf_counter() - begin
        self._saver.wait()
        self._saver.poll()
        return took

    def stop(self) -> float:
        """A save for a stop, until it is committed."""
        begin = time.perf_counter()
        deadline_mono_s = time.monotonic() + GRACE_S
        saved = self._saver.save_by(
            self._state, step=next(self._steps), deadline_mono_s=deadline_mono_s
        )
        took = time.perf_counter() - begin
        self._saver.wait()  # until an old one is removed, or the next arm's fsync does
        assert saved.is_committed, saved.reason
        return took


def save_ours(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    write_checkpoint(CheckpointStore(folder), State({"model": tensors}, {}), SaveRequest(1, "x"))


def save_torch(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    with (folder / "model.pt").open("xb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def save_safetensors(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    with (folder / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def save_dcp(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    dcp.save(tensors, checkpoint_id=folder, no_dist=True)


def load_ours(folder: Path, _: Shapes) -> object:
    store = CheckpointStore(folder)
    (checkpoint,) = store.committed()
    return store.load(checkpoint)


def load_torch(folder: Path, _: Shapes) -> object:
    return torch.load(folder / "model.pt", weights_only=True)


def load_safetensors(folder: Path, _: Shapes) -> object:
    # a mapping into memory would read nothing before the values are used
    with safetensors.torch.safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def load_dcp(folder: Path, shapes: Shapes) -> object:
    target = {name: torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    return target


WAYS = {
    "ours": (save_ours, load_ours),
    "torch_save": (save_torch, load_torch),
    "safetensors": (save_safetensors, load_safetensors),
    "dcp": (save_dcp, load_dcp),
}


def timed_save(name: str, tensors: dict[str, torch.Tensor], parent: Path) -> float:
    """What is written stays, for the loads, until the next round."""
    folder = parent / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()
    begin = time.perf_counter()
    WAYS[name][0](tensors, folder)
    return time.perf_counter() - begin


def timed_load(name: str, shapes: Shapes, parent: Path) -> float:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_load_cold, name, shapes, parent / name).result()


def _load_cold(name: str, shapes: Shapes, folder: Path) -> float:
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.perf_counter()
    loaded = WAYS[name][1](folder, shapes)
    took = time.perf_counter() - begin
    del loaded
    return took


def seconds_of(arms: Mapping[str, Arm], *, repeats: int) -> dict[str, list[float]]:
    """Of each arm in each round, the disk synced before. The first round warms up (fresh memory,
    fresh blocks of the disk) and is not kept."""

    def synced(arm: Arm) -> float:
        os.sync()
        return arm()

    ready = {name: functools.partial(synced, arm) for name, arm in arms.items()}
    return {name: took[1:] for name, took in interleaved(ready, rounds=repeats + 1).items()}


def ratio_to_best(seen: Mapping[str, Sequence[float]]) -> float:
    """The throughput of ours by that of the best other way: 1 and more is better."""
    return min(median_ratio(seen, name, "ours") for name in seen if name != "ours")


def measure(size_bytes: int, folder: Path, repeats: int) -> dict[str, Any]:
    """The figures of one size of state."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="torch.distributed")  # it saves in a single process
    tensors = tensors_of(size_bytes)
    ours = OurSaver(tensors, folder / "saver")
    memory = seconds_of({"stall": ours.stall, "memcpy": ours.memcpy}, repeats=repeats)
    stops = seconds_of({"stop": ours.stop}, repeats=repeats)["stop"]
    ours.close()
    shutil.rmtree(folder / "saver")
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    saves = {name: functools.partial(timed_save, name, tensors, folder) for name in WAYS}
    loads = {name: functools.partial(timed_load, name, shapes, folder) for name in WAYS}
    saved, loaded = (seconds_of(arms, repeats=repeats) for arms in (saves, loads))
    shutil.rmtree(folder)
    return {
        "state_bytes": sum(tensor.nbytes for tensor in tensors.values()),
        "stall_ratio_to_memcpy": median_ratio(memory, "stall", "memcpy"),
        "stop_to_durable_ms": 1e3 * statistics.median(stops),
        "save_ratio_to_best_peer": ratio_to_best(saved),
        "load_ratio_to_best_peer": ratio_to_best(loaded),
    }


def census(repeats: int) -> dict[str, float]:
    """The look for what changes in objects: of a model of 5,000 tensors, and a loader over a
    million items."""
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2_500)))
    loader = DataLoader(list(range(1_000_000)), batch_size=8, shuffle=True)
    first, again = [], []
    for _ in range(repeats + 2):
        found = Census({"loader": loader}, models={"model": model})
        begin = time.perf_counter()
        found.note()
        noted = time.perf_counter()
        found.state()
        first.append(noted - begin)
        again.append(time.perf_counter() - noted)
    return {
        "census_ms": 1e3 * statistics.median(first),
        "census_at_save_ms": 1e3 * statistics.median(again),
    }


def main() -> None:
    chosen = options("What saving and loading cost.")
    sizes, repeats = ((QUICK_BYTES,), 1) if chosen.quick else (SIZES_BYTES, 3)
    result: dict[str, Any] = {}
    with scratch("save") as folder:
        for size_bytes in sizes:
            label = f"{size_bytes / 1e9:g}gb"
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                run = pool.submit(measure, int(size_bytes), folder / label, repeats)
                result |= {f"{key}.{label}": value for key, value in run.result().items()}
    result |= census(repeats)
    finish(chosen, "save: what a checkpoint costs", result)


if __name__ == "__main__":
    main()
