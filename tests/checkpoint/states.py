"""States that tell their step, and the check that one came back bit for bit."""

from __future__ import annotations

import json
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hydroslurm.checkpoint import folders, manifest
from hydroslurm.checkpoint.checksummed_file import BlockSums
from hydroslurm.checkpoint.host_memory import Staging
from hydroslurm.checkpoint.save import SaveRequest, write_checkpoint
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.checkpoint.tree import decode
from hydroslurm.checkpoint.write_plan import WritePlan, divide


def state_of(step: int, *, width: int = 48, base: bool = False) -> State:
    """A small training's state at a step; the same step gives the same bits.

    Args:
        base: with a frozen base model, the same at all steps.
    """
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(width, width, generator=generator)
    frozen = {"w": torch.arange(20_000.0), "b": torch.ones(300, 90).t()} if base else {}
    return State(
        frozen={one.data_ptr() for one in frozen.values()},
        shared={
            **({"base": frozen} if base else {}),
            "model": {"weight": weight, "bias": weight[0].clone(), "tied": weight},
            "optimizer": {
                "state": {0: {"step": torch.tensor(float(step)), "exp_avg": weight * 2}},
                "param_groups": [{"lr": 0.1 / (step + 1), "betas": (0.9, 0.999), "params": [0]}],
            },
        },
        own={
            "rng": {"python": random.Random(step).getstate(), "torch": generator.get_state()},
            "position": {"epoch": step // 3, "batch": step, "seen": np.arange(step)},
        },
    )


def write(
    store: CheckpointStore,
    state: State | WritePlan,
    *,
    cancel: threading.Event | None = None,
    written: Callable[[float], None] | None = None,
    **request: Any,
) -> Checkpoint:
    """Save what a ``SaveRequest`` of these words says."""
    return write_checkpoint(store, state, SaveRequest(**request), cancel=cancel, written=written)


def same(left: Any, right: Any) -> bool:
    """Whether two trees are equal in types, keys, order and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype and left.shape == right.shape and _bits(left) == _bits(right)
        )
    if isinstance(left, np.ndarray):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and (left.tobytes() == right.tobytes())
        )
    if isinstance(left, (float, complex)) and not isinstance(left, np.generic):
        return np.array(left).tobytes() == np.array(right).tobytes()
    if isinstance(left, dict):
        return same(list(left), list(right)) and same(list(left.values()), list(right.values()))
    if isinstance(left, (list, tuple, deque)):
        limits = getattr(left, "maxlen", None), getattr(right, "maxlen", None)
        return len(left) == len(right) and limits[0] == limits[1] and all(map(same, left, right))
    return bool(left == right)


def seal(folder: Path, change: Callable[[dict[str, Any]], object] = dict.items) -> None:
    """Write a manifest that fits to the files, and to itself, as a forger would."""
    body = json.loads((folder / manifest.NAME).read_text())
    del body["checksum"]
    for name in body["files"]:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            sums = BlockSums()
            sums.update(memoryview((folder / name).read_bytes()))
            body["files"][name] = asdict(sums.entry)
    change(body)
    text = json.dumps(body, indent=1) + "\n"
    body["checksum"] = manifest.checksum(text.encode())
    (folder / manifest.NAME).write_text(json.dumps(body, indent=1) + "\n")


def holds(store: CheckpointStore, checkpoint: Checkpoint, step: int) -> bool:
    """Whether a checkpoint has the state of a step, bit for bit."""
    loaded = store.load(checkpoint)
    wanted = state_of(step, base="base" in loaded.shared)
    return same(loaded.shared, wanted.shared) and same(loaded.own, wanted.own)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def revoked_from_anybody(unfinished: Path) -> Path | None:
    """As ``folders.revoked`` in another process."""
    found = folders._LEFTOVER.fullmatch(unfinished.name)
    if found is None or found[1] != "tmp":
        return None
    return folders._mine(unfinished.parent, "old", found[2])


def plan_of_one(state: State) -> WritePlan:
    """What a rank that is alone writes of a state."""
    return divide(state, rank=0, world_size=1)


def state_bytes(state: State) -> int:
    return plan_of_one(state).state_bytes


def copy_of(state: State, staging: Staging | None = None) -> State:
    """A staged copy, put together again."""
    plan = (staging or Staging()).copy(plan_of_one(state))
    assert plan is not None, "there is no memory for a copy"
    tensors = {piece.key: tensor for piece, tensor in zip(plan.pieces, plan.tensors, strict=True)}
    return State(shared=decode(plan.shared, tensors), own=decode(plan.own, tensors))
