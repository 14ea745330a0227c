"""Which checkpoint a run continues from."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from checkpoint.test_saver import state_of

from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore
from hydroslurm.errors import CheckpointCorrupt


def write(store: CheckpointStore, step: int) -> Checkpoint:
    return store.write(state_of(step), step=step, kind="periodic")


def flip_a_bit(checkpoint: Checkpoint) -> None:
    path = checkpoint.path / "part-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_newest_is_found_without_a_warning(tmp_path: Path) -> None:
    """Nothing at first, then the newest step, with the store that loads it."""
    store = CheckpointStore(tmp_path)
    assert newest_good(store) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2, 3):
            write(store, step)
            found = newest_good(store)
            assert found is not None
            assert found.checkpoint.step == step
            assert found.store.load(found.checkpoint).own["n"] == step


def test_a_damaged_one_is_passed_over_with_both_names(tmp_path: Path) -> None:
    """A damaged checkpoint leads to the one before; the warning names what is wrong and what is
    used."""
    store = CheckpointStore(tmp_path)
    write(store, 1)
    flip_a_bit(write(store, 2))
    with pytest.warns(RuntimeWarning, match=r"step-000000002.*continues from .*step-000000001"):
        found = newest_good(store)
    assert found is not None
    assert found.checkpoint.step == 1


def test_none_that_is_whole_is_no_new_beginning(tmp_path: Path) -> None:
    """Checkpoints that are all damaged are an error that names them; one without its manifest
    counts."""
    store = CheckpointStore(tmp_path)
    (write(store, 1).path / "manifest.json").unlink()
    flip_a_bit(write(store, 2))
    with pytest.raises(CheckpointCorrupt, match=r"step-000000002.*step-000000001"):
        newest_good(store)
    write(store, 3)
    found = newest_good(store)
    assert found is not None
    assert found.checkpoint.step == 3
