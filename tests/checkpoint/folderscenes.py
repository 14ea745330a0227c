"""Scenes of jointly.py: checkpoints of so many ranks that their files are in several folders. Three
ranks are many here. Each returns how many rounds it had."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path

import torch
from checkpoint.faulty import CountingStorage, failing, killing
from checkpoint.jointstates import (
    COMMITTED,
    NOT_SAVED,
    RANKS,
    SIGKILLED,
    holds,
    joint_state,
    look,
    save,
)
from checkpoint.pipepeers import PipePeers, together
from checkpoint.states import same
from typer.testing import CliRunner

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.store import CheckpointStore
from hydroslurm.cli.checkpoint import checkpoint_app


def in_folders(folder: Path) -> int:
    """Saved, loaded by as many ranks and by one, verified, listed, exported, copied and removed;
    one with all files in one folder is loaded as well."""
    where = folder / "c"
    assert _save(where, 1) == [COMMITTED] * RANKS
    folders.RANKS_PER_FOLDER = 2
    for step in (2, 3):
        assert _save(where, step) == [COMMITTED] * RANKS
    three = where / "step-000000003"
    assert sorted(path.name for path in three.iterdir()) == [
        "000",
        "001",
        "manifest.json",
        "shared.json",
    ]
    names = sorted(path.name for path in (three / "001").iterdir())
    assert [name for name in names if not name.startswith("frozen-")] == [
        "part-00002.json",
        "part-00002.safetensors",
    ]
    assert together(RANKS, lambda peers: _chosen(where, peers)) == [3] * RANKS
    assert together(2, lambda peers: _chosen(where, peers)) == [3] * 2
    store = CheckpointStore(where)
    assert all(holds(store, found, found.step) for found in store.committed())
    assert "nothing is damaged" in _call("verify", three)
    assert [row["state"] for row in json.loads(_call("ls", where, "--json"))] == ["whole"] * 3
    assert "step 3 of" in _call("export", three, "--only", "large", "--out", folder / "large.pt")
    large = torch.load(folder / "large.pt", weights_only=True)
    assert same(large, joint_state(3, 0).shared["large"])
    damaged = three / "001" / "part-00002.json"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert together(RANKS, lambda peers: _chosen(where, peers)) == [2] * RANKS
    assert str(damaged) in _call("verify", three)
    assert _save(where, 4) == [COMMITTED] * RANKS
    store.prune(keep=2)
    assert sorted(path.name for path in where.iterdir()) == ["step-000000003", "step-000000004"]
    return 1


def in_folders_with_faults(folder: Path) -> int:
    """A rank that dies or whose disk breaks at any call leaves the old or the new state, and
    nothing that is not removed later."""
    folders.RANKS_PER_FOLDER = 2
    where, old, rounds = folder / "c", 1, 0
    assert _save(where, old) == [COMMITTED] * RANKS
    for victim in (0, 2):
        for at in range(2, 30, 4):
            for fault in (killing, lambda n: failing(n, 28, for_good=True)):
                new = old + 1

                def work(peers: PipePeers) -> int:
                    storage = fault(at) if peers.rank == victim else CountingStorage()  # noqa: B023
                    return save(where, peers, new, storage, "save")  # noqa: B023

                ended = together(RANKS, work)
                told = {code for code in ended if code != SIGKILLED}
                assert len(told) == 1, ended
                assert told <= {COMMITTED, NOT_SAVED}, ended
                old = look(where, (old, new))
                assert (old == new) == (told == {COMMITTED})
                rounds += 1
    long_ago = time.time() - 1200
    for path in where.rglob(".tmp-*/**/*"):
        os.utime(path, (long_ago, long_ago))
    for left in where.glob(".tmp-*"):
        os.utime(left, (long_ago, long_ago))
    CheckpointStore(where).prune(keep=2)
    assert not list(where.glob(".*"))
    return rounds


def _save(where: Path, step: int) -> list[int]:
    return together(RANKS, lambda peers: save(where, peers, step, CountingStorage(), "save"))


def _chosen(where: Path, peers: PipePeers) -> int:
    """The step that the ranks choose; each loads it."""
    store = CheckpointStore(where, peers=peers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of rank 0, about the damaged one
        found = newest_good(store, topic="resume", load=lambda one: one.store.load(one.checkpoint))
    assert found is not None
    own = store.load(found.checkpoint).own
    assert own["rank"] == peers.rank
    return found.checkpoint.step


def _call(*arguments: object) -> str:
    return CliRunner().invoke(checkpoint_app, [str(argument) for argument in arguments]).output
