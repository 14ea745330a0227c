"""What only the first saves of a process show; parts of save.py."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import harness  # noqa: F401 - puts the tests' folder on the path
import torch
from checkpoint.disks import HeldDisk

from hydroslurm.checkpoint.deadline import Action
from hydroslurm.checkpoint.estimate import DURABLE_ASSUMED
from hydroslurm.checkpoint.pages import map_pages, populate
from hydroslurm.checkpoint.planner import divide
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, State


def state_of(size_bytes: int) -> State:
    """A transformer's parameters with Adam's state: one large tensor, many middling ones, and more
    that are tiny than both together."""
    wide = size_bytes > 100e6
    hidden, words = (512, 16384) if wide else (64, 4096)
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
    model = {name: torch.randn(shape) for name, shape in shapes.items()}
    moments = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.randn(s), "exp_avg_sq": torch.randn(s)}
        for index, s in enumerate(shapes.values())
    }
    return State(shared={"model": model, "optimizer": {"state": moments}}, own={"step": 1})


def tensors_of(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [tensor for value in tree.values() for tensor in tensors_of(value)]
    return []


def in_fresh_process(measure: Callable[[int, Path], float], size_bytes: int, folder: Path) -> float:
    """What ``measure`` finds in a process that has computed and saved nothing yet. Not in a forked
    one: it would copy each page of the interpreter's objects that it touches."""
    context = get_context("spawn")
    with TemporaryDirectory(dir=folder) as own, ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measure, size_bytes, Path(own)).result()


def first_stall(size_bytes: int, folder: Path, *, early: bool) -> float:
    """How long the first save holds the training / copying the same tensors into ones that are
    there.

    Args:
        early: do not wait until the memory for the copy is touched.
    """
    state = state_of(size_bytes)
    saver = _warm(folder)
    saver.reserve(state)
    while not early and any(one.name == "hydroslurm-reserve" for one in threading.enumerate()):
        time.sleep(0.01)
    stall_s = saver.start(state, step=1)
    saver.close()
    return stall_s / _copying_s(tensors_of(state.shared))


def _copying_s(tensors: Sequence[torch.Tensor]) -> float:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    copying_s = []
    for _ in range(6):
        begin_s = time.perf_counter()
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
        copying_s.append(time.perf_counter() - begin_s)
    return statistics.median(copying_s[1:])


def first_touch(size_bytes: int, _: Path) -> float:
    """How long making the pages of so much fresh memory takes / copying the tensors into ones that
    are there: what a first save cannot do without before its memory is there."""
    state = state_of(size_bytes)
    fresh = memoryview(map_pages(divide(state, rank=0, world_size=1).state_bytes, inherited=False))
    begin_s = time.perf_counter()
    populate(fresh)
    return (time.perf_counter() - begin_s) / _copying_s(tensors_of(state.shared))


def stop_peak(size_bytes: int, folder: Path) -> float:
    """Host memory beyond the state, at its most, when a stop has to save beside a save that hangs;
    as a multiple of the state."""
    state = state_of(size_bytes)
    state_bytes = divide(state, rank=0, world_size=1).state_bytes
    disk = HeldDisk(1)
    saver = _warm(folder, disk)
    copied = Saver(CheckpointStore(folder / "copied"))
    copied.start(State(shared={"x": torch.ones(1000)}, own={}), step=1)
    copied.close()
    before_kb = memory_kb("VmRSS:")
    forget_peak()
    saver.start(state, step=1)
    disk.reached.wait()
    needs_s = DURABLE_ASSUMED.fixed_s + state_bytes / DURABLE_ASSUMED.bytes_per_s
    deadline_s = time.monotonic() + 2.4 * needs_s  # not enough for both
    saved = saver.save_by(state, step=2, deadline_mono_s=deadline_s)
    assert (saved.tier, saved.choice) == ("durable", Action.ABANDON_THEN_FULL), saved.reason
    peak_kb = memory_kb("VmHWM:")
    disk.let_go.set()
    saver.close()
    return (peak_kb - before_kb) * 1024 / state_bytes


def _warm(folder: Path, disk: HeldDisk | None = None) -> Saver:
    """A saver, in a process that has loaded all that a save needs, and whose torch has started its
    threads, which the first step of a training does. They take 15 ms."""
    torch.zeros(1 << 20).add_(1)
    CheckpointStore(folder / "warm").write(
        State(shared={"x": torch.ones(1000)}, own={}), step=1, kind="manual"
    )
    return Saver(CheckpointStore(folder / "saver", **({} if disk is None else {"storage": disk})))


def forget_peak() -> None:
    """VmHWM begins again at what there is now."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_kb(name: str) -> int:
    """Of this process; ``VmRSS:`` is now, ``VmHWM:`` at its most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))
