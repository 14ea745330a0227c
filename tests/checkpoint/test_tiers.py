"""Where a run continues from, over both tiers."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from checkpoint.test_saver import state_of

from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.checkpoint.tiers import Tier
from hydroslurm.errors import CheckpointCorrupt


def stores(folder: Path) -> tuple[CheckpointStore, CheckpointStore]:
    return CheckpointStore(folder / "durable"), CheckpointStore(folder / "fast")


def write(store: CheckpointStore, step: int) -> Checkpoint:
    return store.write(state_of(step), step=step, kind="periodic")


def flip_a_bit(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / "part-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_newest_of_both(tmp_path: Path) -> None:
    """The newest step wins wherever it lies; of the same step the fast one, which loads sooner."""
    durable, fast = stores(tmp_path)
    assert newest_good(durable, fast=fast) is None
    write(durable, 1)
    for step, tier in ((1, Tier.DURABLE), (2, Tier.FAST), (2, Tier.FAST), (3, Tier.DURABLE)):
        if tier is Tier.FAST:
            write(fast, step)
        write(durable, min(step, 2) if tier is Tier.FAST else step)
        found = newest_good(durable, fast=fast)
        assert found is not None
        assert (found.checkpoint.step, found.tier) == (step, tier)
        assert found.store.load(found.checkpoint).own["n"] == step


def test_a_damaged_one_is_passed_over_with_both_names(tmp_path: Path) -> None:
    """A damaged fast checkpoint leads to the durable one of the same step, then to the one before;
    the warning names what is wrong and what is used."""
    durable, fast = stores(tmp_path)
    write(durable, 1)
    flip_a_bit(write(fast, 2))
    second = write(durable, 2)
    with pytest.warns(RuntimeWarning, match=r"fast/step-000000002.*continues from .*durable/step"):
        found = newest_good(durable, fast=fast)
    assert found is not None
    assert (found.checkpoint.step, found.tier) == (2, Tier.DURABLE)
    flip_a_bit(second)
    with pytest.warns(RuntimeWarning, match=r"continues from .*durable/step-000000001"):
        found = newest_good(durable, fast=fast)
    assert found is not None
    assert found.checkpoint.step == 1


def test_none_that_is_whole_is_no_new_beginning(tmp_path: Path) -> None:
    """Checkpoints that are all damaged are an error that names them; one without its manifest
    counts."""
    durable, fast = stores(tmp_path)
    flip_a_bit(write(fast, 2))
    (write(durable, 1).path / "manifest.json").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"fast/step-000000002.*durable/step-000000001"):
        newest_good(durable, fast=fast)
    write(durable, 3)
    found = newest_good(durable, fast=fast)
    assert found is not None
    assert found.checkpoint.step == 3


def test_without_a_fast_tier(tmp_path: Path) -> None:
    """One tier alone works the same, without a warning when all is well."""
    durable, _ = stores(tmp_path)
    write(durable, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = newest_good(durable)
    assert found is not None
    assert found.checkpoint.step == 4


def test_what_each_tier_promises_is_said() -> None:
    """Both promises exist in words, and they differ."""
    assert "same node" in Tier.FAST.promise
    assert Tier.FAST.promise != Tier.DURABLE.promise
