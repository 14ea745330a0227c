"""Saves before a deadline: what is committed when the caller gets control back, and afterwards."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from checkpoint.disks import BrokenDisk, HeldDisk, SlowRemoval, SlowSync
from checkpoint.states import write
from checkpoint.test_saver import state_of, steps, value_at

from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.outcome import SaveEvent
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, Retention
from hydroslurm.core.events import EventKind


def expect(saver: Saver, *, seconds: float) -> None:
    """As if a save had taken so long."""
    saver._pace.add(seconds, state_bytes=4000)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def names(store: CheckpointStore) -> list[str]:
    return [one.path.name for one in store.committed()]


def test_with_time_enough_the_stop_is_durable(tmp_path: Path) -> None:
    """The state is committed as a stop, nothing is at risk, and the choice is in words."""
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    saved = saver.save_by(
        lambda: state_of(5.0), step=5, epoch=1, deadline_mono_s=in_s(600), meta={"why": "test"}
    )
    assert (saved.is_committed, saved.steps_at_risk) == (True, 0)
    assert not saved.still_writing
    assert saved.reason.startswith("step 5 is committed; a full save needs about 1.0 s of the")
    assert saved.checkpoint is not None
    assert (saved.checkpoint.kind, saved.checkpoint.manifest.meta) == ("stop", {"why": "test"})
    assert value_at(store, 5) == (5.0, 5.0)


def test_one_under_way_is_waited_for_when_both_fit(tmp_path: Path) -> None:
    """The periodic save is committed first, then the stop's."""
    disk, told = HeldDisk(4), list[SaveEvent]()
    store = CheckpointStore(tmp_path, storage=disk)

    def tell(event: SaveEvent) -> None:
        told.append(event)
        if event.save_kind == "stop" and event.kind is EventKind.SAVE_STARTED:
            disk.let_go.set()

    saver = Saver(store, tell=tell)
    saver.start(state_of(4.0), step=4)
    assert disk.reached.wait(60)
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(600))
    assert saved.is_committed
    assert saved.reason.endswith("both fit")
    committed = [event.step for event in told if event.kind is EventKind.SAVE_COMMITTED]
    assert committed == [4, 5]


def test_a_disk_that_has_just_become_slow(tmp_path: Path) -> None:
    """A sync that hangs counts at once, and still when its save has failed."""
    disk = SlowSync(2)
    saver = Saver(CheckpointStore(tmp_path, storage=disk))
    saver.save(state_of(1.0), step=1)
    quick_s = saver.expect_s()
    saver.start(state_of(2.0), step=2)
    assert disk.reached.wait(60)
    wait_s = 10 * quick_s
    time.sleep(wait_s)
    assert saver.expect_s() >= wait_s
    disk.let_go.set()
    assert saver.wait(timeout_s=60)
    with pytest.warns(RuntimeWarning, match="Input/output error"):
        saver.poll()
    assert steps(CheckpointStore(tmp_path)) == [1]
    assert saver.expect_s() >= wait_s
    saver.close()


def test_one_that_hangs_is_given_up(tmp_path: Path) -> None:
    """The stop is committed, without a copy, beside a save that a hung disk holds; when that comes
    back it ends without a commit, and is told as given up and not as failed."""
    disk, told = HeldDisk(4), list[SaveEvent]()
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store, tell=told.append)
    expect(saver, seconds=20.0)  # each of the two; 1.5 times that has to fit
    saver.start(state_of(4.0), step=4)
    assert disk.reached.wait(60)
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(40))
    assert saved.is_committed
    assert saved.reason.endswith("that one is given up")
    disk.let_go.set()
    saver.close()
    assert steps(store) == [5]
    assert value_at(store, 5) == (5.0, 5.0)
    assert [event.step for event in told if event.kind is EventKind.SAVE_ABANDONED] == [4]
    assert [event.step for event in told if event.kind is EventKind.SAVE_STAGED] == [4]


def test_one_that_takes_longer_than_it_should_is_given_up_in_time(tmp_path: Path) -> None:
    """A save that was to be waited for and hangs does not cost the stop its own save."""
    disk = HeldDisk(4)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    expect(saver, seconds=0.01)
    saver.start(state_of(4.0), step=4)
    expect(saver, seconds=20.0)  # leaves 2 s for the one under way
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(32))
    assert saved.is_committed
    assert saved.reason.endswith("both fit")
    disk.let_go.set()
    saver.close()
    assert steps(store) == [5]


def test_the_save_of_this_state_is_the_stop(tmp_path: Path) -> None:
    """A periodic save of the very state is waited for, and not made again."""
    disk, told = HeldDisk(5), list[SaveEvent]()
    store = CheckpointStore(tmp_path, storage=disk)

    def tell(event: SaveEvent) -> None:
        told.append(event)
        if event.save_kind == "stop":
            disk.let_go.set()

    saver = Saver(store, tell=tell)
    saver.start(state_of(5.0), step=5)
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(600), unchanged=True)
    assert saved.is_committed
    assert "the save in flight is of this very step 5" in saved.reason
    assert sum(event.kind is EventKind.SAVE_COMMITTED for event in told) == 1


def test_a_stop_does_not_wait_for_old_ones_to_be_removed(tmp_path: Path) -> None:
    """What is durable is told at once; the removal of older checkpoints comes after, and is waited
    for by close()."""
    disk = SlowRemoval()
    store = CheckpointStore(tmp_path, storage=disk)
    for step in (1, 2, 3):
        write(store, state_of(step), step=step, kind="stop")
    saver = Saver(store, retention=Retention(keep=1, keep_stop=1))
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(600))
    assert (saved.is_committed, saved.still_writing) == (True, False)
    assert not saver.wait(timeout_s=0)
    disk.let_go.set()
    saver.close()
    assert steps(store) == [3, 5]


def test_a_committed_state_is_not_saved_again(tmp_path: Path) -> None:
    """Neither one of this attempt nor the one that the run continued from, and the state is as good
    as durable."""
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    saver.save(state_of(5.0), step=5)
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(-1), unchanged=True)
    assert saved.is_committed
    assert saved.reason.endswith("step 5 is committed already")
    later = Saver(store)
    later.continues_from(store.committed()[-1])
    saved = later.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(-1), unchanged=True)
    assert saved.is_committed
    assert saved.reason.endswith("step 5 is committed already")


def test_a_state_that_may_have_changed_is_saved_again_at_its_step(tmp_path: Path) -> None:
    """The one before stays until the new one is committed, which is the newer one; where there is
    no time for it, the one before is what is kept, and that is said."""
    disk = HeldDisk(5)
    disk.let_go.set()
    store = CheckpointStore(tmp_path, storage=disk)
    Saver(store).save(state_of(5.0), step=5)
    saver = Saver(store)
    saved = saver.save_by(state_of(6.0), step=5, deadline_mono_s=in_s(600))
    assert saved.is_committed
    assert names(store) == ["step-000000005", "step-000000005.2"]
    found = newest_good(store)
    assert found is not None
    assert float(store.load(found.checkpoint).shared["model"]["w"][0]) == 6.0
    alone = Saver(store)
    alone.continues_from(found.checkpoint)
    disk.let_go.clear()
    saved = alone.save_by(state_of(8.0), step=5, deadline_mono_s=in_s(-1))
    assert (saved.is_committed, saved.steps_at_risk) == (False, 0)
    assert "what was changed since then is lost" in saved.reason
    assert f"what is kept is an earlier save of this step ({found.checkpoint.path})" in saved.reason
    disk.let_go.set()
    alone.close()


def test_the_caller_has_control_at_the_deadline(tmp_path: Path) -> None:
    """With a disk that hangs the stop comes back, says what is kept and lost, and the save goes on:
    it is committed with the state of the stop when the disk does."""
    disk = HeldDisk(5)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    saver.save(state_of(3.0), step=3)
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(-1))
    assert (saved.is_committed, saved.still_writing) == (False, True)
    assert saved.steps_at_risk == 2
    assert saved.checkpoint is not None
    assert saved.checkpoint.step == 3
    assert "step 3 is committed, and 2 steps are lost" in saved.reason
    disk.let_go.set()
    assert saver.wait(timeout_s=60)
    assert value_at(store, 5) == (5.0, 5.0)


def test_a_late_stop_follows_what_is_under_way(tmp_path: Path) -> None:
    """When nothing fits, the older save goes on with its copy, and the stop's comes after it."""
    disk = HeldDisk(4)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    saver.start(state_of(4.0), step=4)
    assert disk.reached.wait(60)
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(0))
    assert (saved.is_committed, saved.still_writing) == (False, True)
    disk.let_go.set()
    saver.close()
    assert [value_at(store, step)[0] for step in (4, 5)] == [4.0, 5.0]


def test_a_failure_is_told_and_not_raised(tmp_path: Path) -> None:
    """A full disk at a stop leaves the caller its grace: what is kept is said, and poll does not
    repeat it."""
    saver = Saver(CheckpointStore(tmp_path, storage=BrokenDisk(5)))
    saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=in_s(600))
    assert (saved.is_committed, saved.checkpoint, saved.steps_at_risk) == (False, None, 5)
    assert "the save failed" in saved.reason
    assert "No space left" in saved.reason
    saver.close()


def test_a_state_that_cannot_be_had_costs_no_save_under_way(tmp_path: Path) -> None:
    """An error in state_dict() is raised after the save under way was waited for."""
    store = CheckpointStore(tmp_path)
    saver = Saver(store)
    saver.start(state_of(4.0), step=4)

    def broken() -> None:
        raise KeyError("momentum")

    with pytest.raises(KeyError, match="momentum"):
        saver.save_by(broken, step=5, deadline_mono_s=in_s(600))  # type: ignore[arg-type]
    assert steps(store) == [4]


def test_a_deadline_may_be_for_ever(tmp_path: Path) -> None:
    """No deadline is math.inf, which no wait may overflow on."""
    saved = Saver(CheckpointStore(tmp_path)).save_by(
        state_of(1.0), step=1, deadline_mono_s=math.inf
    )
    assert saved.is_committed
