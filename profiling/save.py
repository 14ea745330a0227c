"""What saving costs: the disk, the training and the grace.

Interleaved in one process, medians over the rounds; before each measurement the disk is synced:

    save_ratio_to_disk        plain write + fsync of the same bytes / our committed save
    torch_save_ratio_to_disk  the same / torch.save + fsync, without checksums, fsynced folders
                              or a commit
    stall_ratio_to_memcpy     how long an asynchronous save holds the training / copying the same
                              tensors into ones that are there already
    stop_to_durable_ms        from the request to stop to the committed checkpoint

Once in each of some fresh processes, medians:

    first_stall_ratio_to_memcpy   the first asynchronous save, when the memory for its copy has been
                                  touched in the background; ... _early: while that is still done
    first_touch_ratio_to_memcpy   making the pages of as much fresh memory: what bounds _early
    stop_peak_ratio_to_state      host memory that saving takes beside the state, at its most, while
                                  a stop writes beside a periodic save that a hung disk holds / the
                                  state. One copy for periodic saves is 1

Beside torch.save, DCP and safetensors (``save_peers.py``), as throughput of ours / theirs:

    save_ratio_to_best_peer        each with an fsync
    load_ratio_to_best_peer        of the whole state, with a cold page cache, in a fresh process
    load_ratio_to_plain_read       the same / reading the bytes only
    load_cpu_s_per_gb              of all threads, and ... .plain_fresh: of reading the same bytes
                                   into memory that nobody has touched
    commit_cpu_s_512               of rank 0, when 512 ranks have written 1,600 tensors
    commit_memory_mb_512           what its memory grows by meanwhile, at its most
    commit_gil_held_ms_512         the longest that another thread of rank 0 waits for the
                                   interpreter meanwhile; python_ and idle_gil_held_ms: beside a
                                   loop of pure Python, and beside nothing

Of a base model and a hundredth as much that is trained, when a checkpoint has the base model; each
/ the same where all of it is trained:

    frozen_stop_ratio              a stop, until it is committed
    frozen_stall_ratio             how long a periodic save holds the training
    frozen_written_ratio           bytes that a checkpoint adds on the disk

All of it for several sizes of state, whose names end a key: load_ratio_to_best_peer.1gb.
"""

from __future__ import annotations

import functools
import json
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

import save_peers
import torch
from first_save import first_stall, first_touch, in_fresh_process, state_of, stop_peak, tensors_of
from harness import finish, interleaved, median_ratio, parser, percentile, scratch

from hydroslurm.checkpoint.planner import divide
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State

PIECE_BYTES = 8 << 20
SIZES_BYTES = (1e8, 1e9, 4e9)
GRACE_S = 600.0
FRESH = 5
"""Fresh processes for each figure that needs them, at most."""

PARTS = ("first", "save", "frozen", "peers", "commit")


class Bench:
    """One state, one folder, and the things that are timed."""

    def __init__(self, state: State, folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.size_bytes = divide(state, rank=0, world_size=1).state_bytes
        self._plain = memoryview(
            torch.randint(0, 256, (self.size_bytes,), dtype=torch.uint8).numpy()
        )
        self._tensors = tensors_of(state.shared)
        self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
        self._store = CheckpointStore(folder / "store")
        self._saver = Saver(CheckpointStore(folder / "saver"))
        self._step = 0

    def disk(self) -> float:
        """Write the same number of bytes and fsync."""
        path = self.folder / "plain"
        begin = time.perf_counter()
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, self.size_bytes, PIECE_BYTES):
            os.write(fd, self._plain[start : start + PIECE_BYTES])
        os.fsync(fd)
        os.close(fd)
        took = time.perf_counter() - begin
        path.unlink()
        return took

    def ours(self) -> float:
        """A committed checkpoint."""
        begin = time.perf_counter()
        checkpoint = self._store.write(self.state, step=self._next(), kind="manual")
        took = time.perf_counter() - begin
        shutil.rmtree(checkpoint.path)
        return took

    def torch_save(self) -> float:
        """torch.save of the same state, and fsync."""
        path = self.folder / "torch.pt"
        begin = time.perf_counter()
        with path.open("xb") as file:
            torch.save({"shared": self.state.shared, "own": self.state.own}, file)
            file.flush()
            os.fsync(file.fileno())
        took = time.perf_counter() - begin
        path.unlink()
        return took

    def memcpy(self) -> float:
        """Copy every tensor into one that is there."""
        begin = time.perf_counter()
        for copy, tensor in zip(self._copies, self._tensors, strict=True):
            copy.copy_(tensor)
        return time.perf_counter() - begin

    def stall(self) -> float:
        """What a periodic save takes from the training."""
        begin = time.perf_counter()
        self._saver.start(self.state, step=self._next())
        took = time.perf_counter() - begin
        self._saver.wait()
        self._saver.poll()
        return took

    def stop(self) -> float:
        """A save for a stop, until it is committed."""
        begin = time.perf_counter()
        saved = self._saver.save_by(
            self.state, step=self._next(), deadline_mono_s=time.monotonic() + GRACE_S
        )
        took = time.perf_counter() - begin
        self._saver.wait()  # until an old one is removed, or the next arm's fsync does
        assert saved.tier == "durable", saved.reason
        return took

    def newest(self) -> Checkpoint:
        """Of those that the saver has written."""
        return CheckpointStore(self.folder / "saver").committed()[-1]

    def close(self) -> None:
        self._saver.close()

    def _next(self) -> int:
        self._step += 1
        return self._step


def _named(tree: Any, name: str = "state") -> dict[str, torch.Tensor]:
    """The tensors of a tree, by where they are."""
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    return {
        key: tensor
        for part, value in tree.items()
        for key, tensor in _named(value, f"{name}.{part}").items()
    }


def seconds_of(arms: Mapping[str, Callable[[], float]], *, repeats: int) -> dict[str, list[float]]:
    """Of each arm in each round, the disk synced before. The first round warms up (fresh memory,
    fresh blocks of the disk) and is not kept."""

    def synced(arm: Callable[[], float]) -> float:
        os.sync()
        return arm()

    ready = {name: functools.partial(synced, arm) for name, arm in arms.items()}
    return {name: s[1:] for name, s in interleaved(ready, rounds=repeats + 1).items()}


def measure_fresh(size_bytes: int, folder: Path, *, repeats: int) -> dict[str, float]:
    """What only a process that has saved nothing yet can show."""
    arms = {
        "first_stall_ratio_to_memcpy": functools.partial(first_stall, early=False),
        "first_stall_early_ratio_to_memcpy": functools.partial(first_stall, early=True),
        "first_touch_ratio_to_memcpy": first_touch,
        "stop_peak_ratio_to_state": stop_peak,
    }
    seen = interleaved(
        {
            name: functools.partial(in_fresh_process, arm, size_bytes, folder)
            for name, arm in arms.items()
        },
        rounds=repeats,
    )
    return {name: statistics.median(values) for name, values in seen.items()}


def measure(bench: Bench, *, repeats: int) -> dict[str, float]:
    memory = seconds_of({"stall": bench.stall, "memcpy": bench.memcpy}, repeats=repeats)
    disk = seconds_of(
        {"ours": bench.ours, "disk": bench.disk, "torch": bench.torch_save, "stop": bench.stop},
        repeats=repeats,
    )
    bench.close()
    return {
        "state_bytes": bench.size_bytes,
        "save_ratio_to_disk": median_ratio(disk, "disk", "ours"),
        "torch_save_ratio_to_disk": median_ratio(disk, "disk", "torch"),
        "stall_ratio_to_memcpy": median_ratio(memory, "stall", "memcpy"),
        "stop_to_durable_ms": 1e3 * statistics.median(disk["stop"]),
        "stop_to_durable_ms_max": 1e3 * max(disk["stop"]),
        "save_ms": 1e3 * statistics.median(disk["ours"]),
        "disk_ms": 1e3 * statistics.median(disk["disk"]),
        "disk_ms_p99": 1e3 * percentile(disk["disk"], 99),
        "torch_save_ms": 1e3 * statistics.median(disk["torch"]),
        "stall_ms": 1e3 * statistics.median(memory["stall"]),
        "memcpy_ms": 1e3 * statistics.median(memory["memcpy"]),
        "repeats": repeats,
    }


def adapted(size_bytes: int, *, is_frozen: bool) -> State:
    """A base model of about this size, and a hundredth as much that is trained."""
    base = {f"w{n}": torch.randn(1 << 21) for n in range(max(1, size_bytes >> 23))}
    adapter = {name: torch.randn((1 << 21) // 100) for name in base}
    frozen = {one.data_ptr() for one in base.values()} if is_frozen else ()
    return State(shared={"base": base, "adapter": adapter}, own={}, frozen=frozen)


def measure_frozen(size_bytes: int, folder: Path, *, repeats: int) -> dict[str, float]:
    """What a base model that a checkpoint has already adds to saving."""
    benches = {
        name: Bench(adapted(size_bytes, is_frozen=name == "stored"), folder / name)
        for name in ("stored", "all")
    }
    stops = {name: bench.stop for name, bench in benches.items()}
    stalls = {name: bench.stall for name, bench in benches.items()}
    stop, stall = (seconds_of(arms, repeats=repeats) for arms in (stops, stalls))
    written = {}
    for name, bench in benches.items():
        bench.close()
        manifest = bench.newest().manifest
        written[name] = [manifest.state_bytes]
    return {
        "frozen_stop_ratio": median_ratio(stop, "stored", "all"),
        "frozen_stall_ratio": median_ratio(stall, "stored", "all"),
        "frozen_written_ratio": median_ratio(written, "stored", "all"),
        "frozen_stop_ms": 1e3 * statistics.median(stop["stored"]),
        "frozen_stall_ms": 1e3 * statistics.median(stall["stored"]),
    }


def beside_peers(folder: Path, size_bytes: int, *, repeats: int) -> dict[str, Any]:
    """What ours costs beside others, by key."""
    tensors = _named(state_of(size_bytes).shared)
    found = save_peers.measure(tensors, folder / "peers", repeats=repeats)
    return {
        "save_ratio_to_best_peer": found["save_ratio_to_best_peer"],
        "load_ratio_to_best_peer": found["load_ratio_to_best_peer"],
        "load_ratio_to_plain_read": found["load_ratio_to_plain_read"],
        "load_cpu_s_per_gb": found["load_cpu_s_per_gb"]["ours"],
        "load_cpu_excess_s_per_gb": found["load_cpu_s_per_gb"]["ours"]
        - found["load_cpu_s_per_gb"]["plain_fresh"],
        **{f"save_s_{name}": took for name, took in found["save_s"].items()},
        **{f"load_s_{name}": took for name, took in found["load_s"].items()},
        **{f"load_cpu_s_per_gb_{name}": cpu for name, cpu in found["load_cpu_s_per_gb"].items()},
    }


def of_size(
    size_bytes: int, folder: Path, *, parts: Sequence[str], repeats: int, fresh: int
) -> dict[str, Any]:
    """The figures of one size of state."""
    folder.mkdir()
    result: dict[str, Any] = {}
    if "first" in parts:
        result |= measure_fresh(size_bytes, folder, repeats=fresh)
    if "save" in parts:
        result |= measure(Bench(state_of(size_bytes), folder), repeats=repeats)
    if "frozen" in parts:
        result |= measure_frozen(size_bytes, folder / "frozen", repeats=repeats)
    if "peers" in parts:
        result |= beside_peers(folder, size_bytes, repeats=repeats)
    return result


def main() -> None:
    wanted = parser("What saving costs.", directory=True)
    wanted.add_argument(
        "--bytes", type=float, nargs="+", default=SIZES_BYTES, help="about so large states"
    )
    wanted.add_argument("--repeats", type=int, default=5, help="rounds")
    wanted.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    wanted.add_argument(
        "--more", type=Path, help="results of this script: of what is not measured now"
    )
    chosen = wanted.parse_args()
    warnings.simplefilter("error")
    sizes = [16e6] if chosen.quick else chosen.bytes
    repeats = 1 if chosen.quick else chosen.repeats
    result: dict[str, Any] = json.loads(chosen.more.read_text()) if chosen.more else {}
    for key in ("script", "quick", "environment"):
        result.pop(key, None)
    fresh = 1 if chosen.quick else min(FRESH, repeats)
    run = functools.partial(of_size, parts=chosen.parts, repeats=repeats, fresh=fresh)
    with scratch("save", chosen) as folder:
        for size_bytes in sizes:
            label = f"{size_bytes / 1e9:g}gb"
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found = pool.submit(run, int(size_bytes), folder / label).result()
            result |= {f"{key}.{label}": value for key, value in found.items()}
        if "commit" in chosen.parts:
            result |= save_peers.commit_of_many(folder / "commit", repeats=repeats)
    finish(chosen, "save: what a checkpoint costs", result)


if __name__ == "__main__":
    main()
