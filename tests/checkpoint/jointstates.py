"""A state of several ranks, its save by one of them, and what must be there afterwards."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from checkpoint.pipepeers import PipePeers
from checkpoint.states import newest_in, same, state_of, write

from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, State
from hydroslurm.errors import SaveAbandoned, SaveFailed

RANKS = 3
COMMITTED, NOT_SAVED, NOT_KNOWN, ABANDONED = 0, 3, 4, 5
SIGKILLED = -signal.SIGKILL

Fault = Callable[[PipePeers], Storage]


def joint_state(step: int, rank: int) -> State:
    """What the ranks share is the same on all; a part of it is large enough to be divided."""
    state = state_of(step, base=True)
    generator = torch.Generator().manual_seed(step + 1)
    large = {f"w{n}": torch.randn(130 + n, 130, generator=generator) for n in range(4)}
    shared = {**state.shared, "large": {**large, "tied": large["w1"], "t": large["w2"].t()}}
    own = {**state_of(100 * step + rank).own, "rank": rank}
    return State(shared=shared, own=own, frozen=state.frozen)


def save(folder: Path, peers: PipePeers, step: int, storage: Storage, topic: str) -> int:
    """One rank's save; how it ended, which is also looked up in the words."""
    store = CheckpointStore(folder, storage=storage, peers=peers, patience_s=60)
    for before in CheckpointStore(folder).committed():
        store.frozen.note(before)
    try:
        found = write(store, joint_state(step, peers.rank), step=step, kind="periodic", topic=topic)
    except SaveAbandoned:
        return ABANDONED
    except SaveFailed as error:
        print(f"rank {peers.rank}: {error}", flush=True)
        return NOT_KNOWN if "not known" in str(error) else NOT_SAVED
    assert found.step == step
    assert found.manifest.world_size == RANKS
    return COMMITTED


def look(folder: Path, steps: tuple[int, ...]) -> int:
    """The newest good checkpoint, which is of one of these steps, whole, bit for bit."""
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = newest_in(store)
    assert found is not None
    assert found.step in steps, f"{found.step} instead of one of {steps}"
    assert holds(store, found, found.step), f"step {found.step} came back changed"
    return found.step


def holds(store: CheckpointStore, found: Checkpoint, step: int) -> bool:
    state = store.load(found)
    wanted = joint_state(step, 0)
    return same(dict(state.shared), dict(wanted.shared)) and all(
        same(dict(store.load_own(found, rank)), dict(joint_state(step, rank).own))
        for rank in range(RANKS)
    )
