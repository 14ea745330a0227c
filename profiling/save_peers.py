"""Checkpoints beside those of torch.save, torch.distributed.checkpoint (DCP) and safetensors.

All of them write the same tensors and fsync them; ours also checksums, fsyncs the folders and
commits. A load reads what was written with a cold page cache: the files are dropped from it before.
On a tmpfs (/dev/shm) there is no such thing, and what is compared is the work of the processor.
Each load is the first one of a fresh process, as it is when a training resumes: a second one would
find memory that the first one has touched and given back to the allocator. Not of a forked one: it
would copy each page of the interpreter's objects that it touches.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import mmap
import os
import resource
import shutil
import statistics
import threading
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
from first_save import forget_peak, memory_kb
from harness import interleaved, median_ratio

from hydroslurm.checkpoint.store import CheckpointStore, State
from hydroslurm.checkpoint.writer import names_of

PLAIN = ("plain", "plain_fresh")
"""Loads that give no tensors."""

RANKS = 512
KEYS = 1600
PIECE_BYTES = 8 << 20
TICK_S = 1e-3

Arm = Callable[[], float]
Specs = Mapping[str, tuple[torch.Size, torch.dtype]]


class Peers:
    """Each way to save and to load one flat dict of tensors, in a folder of its own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
        self._tensors = dict(tensors)
        self._folder = folder
        self._steps = itertools.count(1)
        self.size_bytes = sum(one.nbytes for one in self._tensors.values())
        self.load_cpu_s: dict[str, list[float]] = {name: [] for name in LOADS}
        logging.getLogger("torch.distributed").setLevel(logging.ERROR)

    def saves(self) -> dict[str, Arm]:
        """Each keeps what it has written last, for the loads."""
        ways = {
            "ours": self._save_ours,
            "torch_save": self._save_torch,
            "dcp": self._save_dcp,
            "dcp_async": self._save_dcp_async,
            "safetensors": self._save_safetensors,
        }
        return {name: functools.partial(self._timed_save, name, way) for name, way in ways.items()}

    def loads(self) -> dict[str, Arm]:
        """For after the saves."""
        return {name: functools.partial(self._timed_load, name) for name in LOADS}

    def _timed_save(self, name: str, way: Callable[[Path], None]) -> float:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()
        begin = time.perf_counter()
        way(folder)
        return time.perf_counter() - begin

    def _timed_load(self, name: str) -> float:
        folder = self._folder / ("ours" if name in PLAIN else name)
        specs = {key: (one.shape, one.dtype) for key, one in self._tensors.items()}
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            took_s, cpu_s = pool.submit(load_once, name, folder, specs).result()
        self.load_cpu_s[name].append(cpu_s)
        return took_s

    def _save_ours(self, folder: Path) -> None:
        state = State({"model": self._tensors}, {})
        CheckpointStore(folder).write(state, step=next(self._steps), kind="x")

    def _save_torch(self, folder: Path) -> None:
        with (folder / "model.pt").open("xb") as file:
            torch.save(self._tensors, file)
            file.flush()
            os.fsync(file.fileno())

    def _save_safetensors(self, folder: Path) -> None:
        safetensors.torch.save_file(self._tensors, folder / "model.safetensors")
        with (folder / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())

    def _save_dcp(self, folder: Path) -> None:
        dcp.save(self._tensors, checkpoint_id=folder, no_dist=True)

    def _save_dcp_async(self, folder: Path) -> None:
        dcp.async_save(self._tensors, checkpoint_id=folder, no_dist=True).result()


def load_once(name: str, folder: Path, specs: Specs) -> tuple[float, float]:
    """How long a load takes with a cold page cache, and how much of the processor; in seconds."""
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    drop_from_cache(folder)
    before_s, begin_s = _cpu_s(), time.perf_counter()
    found = LOADS[name](folder, specs)
    took = time.perf_counter() - begin_s, _cpu_s() - before_s
    del found
    return took


def _read_plain(folder: Path, _: Specs) -> None:
    buffer = bytearray(PIECE_BYTES)
    for path in sorted(folder.rglob("part-*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _read_fresh(folder: Path, _: Specs) -> object:
    """Into memory that nobody has touched: what every load of tensors does at least."""
    found = []
    for path in sorted(folder.rglob("part-*.safetensors")):
        with path.open("rb", buffering=0) as file:
            whole = memoryview(mmap.mmap(-1, path.stat().st_size))
            for begin in range(0, len(whole), PIECE_BYTES):
                file.readinto(whole[begin : begin + PIECE_BYTES])
            found.append(whole)
    return found


def _load_ours(folder: Path, _: Specs) -> object:
    store = CheckpointStore(folder)
    (checkpoint,) = store.committed()
    return store.load(checkpoint)


def _load_torch(folder: Path, _: Specs) -> object:
    return torch.load(folder / "model.pt", weights_only=True)


def _load_safetensors(folder: Path, _: Specs) -> object:
    # a mapping into memory would read nothing before the values are used
    with safetensors.torch.safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118


def _load_dcp(folder: Path, specs: Specs) -> object:
    target = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in specs.items()}
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    return target


LOADS: Mapping[str, Callable[[Path, Specs], object]] = {
    "plain": _read_plain,
    "plain_fresh": _read_fresh,
    "ours": _load_ours,
    "torch_save": _load_torch,
    "dcp": _load_dcp,
    "safetensors": _load_safetensors,
}


def measure(tensors: Mapping[str, torch.Tensor], folder: Path, *, repeats: int) -> dict[str, Any]:
    """Medians in seconds of every way, and ours beside the best of the others."""
    folder.mkdir()
    peers = Peers(tensors, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP says that it saves in a single process
        saved = _seconds(peers.saves(), repeats=repeats)
        loaded = _seconds(peers.loads(), repeats=repeats)
    shutil.rmtree(folder)
    return {
        "bytes": peers.size_bytes,
        "save_s": {name: statistics.median(took) for name, took in saved.items()},
        "load_s": {name: statistics.median(took) for name, took in loaded.items()},
        "save_ratio_to_best_peer": _to_best(saved, but=("ours",)),
        "load_ratio_to_best_peer": _to_best(loaded, but=("ours", *PLAIN)),
        "load_ratio_to_plain_read": median_ratio(loaded, "plain", "ours"),
        "load_cpu_s_per_gb": {
            name: statistics.median(cpu_s) / (peers.size_bytes / 1e9)
            for name, cpu_s in peers.load_cpu_s.items()
        },
    }


def _seconds(arms: Mapping[str, Arm], *, repeats: int) -> dict[str, list[float]]:
    """The first round warms up and is not kept."""
    return {name: took[1:] for name, took in interleaved(arms, rounds=repeats + 1).items()}


def _to_best(seen: Mapping[str, Sequence[float]], *, but: Sequence[str]) -> float:
    """The throughput of ours by that of the best other way: 1 and more is better."""
    return min(median_ratio(seen, name, "ours") for name in seen if name not in but)


def drop_from_cache(folder: Path) -> None:
    """What is read next comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class SimulatedRanks:
    """The peers of rank 0 in a world whose other ranks have written nothing but their answers."""

    rank, world_size = 0, RANKS

    def __init__(self) -> None:
        self.all_written_cpu_s = 0.0
        self.all_written_s = 0.0

    def agree(self, topic: str, value: Any, **_: Any) -> Mapping[int, Any]:
        answers = dict.fromkeys(range(RANKS), value)
        if topic.endswith("/written"):
            entry = next(iter(value["files"].values()))
            for rank in range(1, RANKS):
                files = dict.fromkeys(sorted(names_of(rank, RANKS)), entry)
                text = json.dumps({**value, "files": files, "tally": 0})
                answers[rank] = json.loads(text)  # objects of their own, as from a connection
            self.all_written_cpu_s, self.all_written_s = _cpu_s(), time.perf_counter()
        return answers


class Ticks(threading.Thread):
    """A thread that wants the interpreter every millisecond, as a training does, and notes by how
    much it came late."""

    def __init__(self) -> None:
        super().__init__(name="ticks", daemon=True)
        self._late: list[tuple[float, float]] = []
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.is_set():
            begin_s = time.perf_counter()
            time.sleep(TICK_S)
            now_s = time.perf_counter()
            self._late.append((now_s, now_s - begin_s - TICK_S))

    def worst_s(self, begin_s: float) -> float:
        """From then on until now."""
        time.sleep(20 * TICK_S)  # the tick that is late now is noted
        return max(late_s for at_s, late_s in tuple(self._late) if at_s >= begin_s)

    def __enter__(self) -> Ticks:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()


def commit_of_many(folder: Path, *, repeats: int) -> dict[str, float]:
    """What a commit of many ranks takes of rank 0's processor, and for how long it keeps another
    thread of rank 0 from the interpreter: from the moment when all have written to the committed
    checkpoint. The tensors are so small that all of them are rank 0's.

    Another thread may always have to wait for 5 ms, the interpreter's own interval. So the same
    thread is watched beside a loop of pure Python, and beside nothing, for as long.
    """
    state = State({f"layer{n}": torch.zeros(4) for n in range(KEYS)}, {})
    cpu_s: list[float] = []
    more_mb: list[float] = []
    late_s: dict[str, list[float]] = {"commit": [], "python": [], "idle": []}
    with Ticks() as ticks:
        for number in range(repeats):
            peers = SimulatedRanks()
            store = CheckpointStore(folder / str(number), peers=peers)
            before_kb = memory_kb("VmRSS:")
            forget_peak()
            store.write(state, step=1, kind="x")
            more_mb.append((memory_kb("VmHWM:") - before_kb) * 1.024e-3)
            cpu_s.append(_cpu_s() - peers.all_written_cpu_s)
            took_s = time.perf_counter() - peers.all_written_s
            late_s["commit"].append(ticks.worst_s(peers.all_written_s))
            begin_s = time.perf_counter()
            while time.perf_counter() - begin_s < took_s:
                pass
            late_s["python"].append(ticks.worst_s(begin_s))
            begin_s = time.perf_counter()
            time.sleep(took_s)
            late_s["idle"].append(ticks.worst_s(begin_s))
    held_ms = {name: 1e3 * statistics.median(seen) for name, seen in late_s.items()}
    return {
        f"commit_cpu_s_{RANKS}": statistics.median(cpu_s),
        f"commit_memory_mb_{RANKS}": max(more_mb),
        f"commit_gil_held_ms_{RANKS}": held_ms["commit"],
        f"commit_gil_held_ms_{RANKS}_max": 1e3 * max(late_s["commit"]),
        "python_gil_held_ms": held_ms["python"],
        "idle_gil_held_ms": held_ms["idle"],
    }
