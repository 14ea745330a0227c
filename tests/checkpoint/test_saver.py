"""Saves beside the training and before a deadline: what is committed, what is reported, and who
waits for whom."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from checkpoint.disks import (
    BrokenDisk,
    HeldDisk,
    LateFolder,
    Saving,
    no_room,
    state_of,
)
from checkpoint.states import write
from zygote import forked

from hydroslurm.checkpoint.deadline import ASSUMED_FIXED_S
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State, newest_good
from hydroslurm.core.events import EventKind
from hydroslurm.core.memory import Room
from hydroslurm.errors import SaveFailed, UnsavableState, UsageError


def test_training_goes_on_at_once(tmp_path: Path) -> None:
    """What training changes while the save is held on the disk is not in the checkpoint, nor what
    memory is had for meanwhile. The save tells when it begins, when the training goes on, when the
    files are on the disk, and when the checkpoint is committed."""
    on = Saving(tmp_path, HeldDisk(1))
    state = state_of(1.0)
    assert on.start(1, state) > 0
    state.shared["model"]["w"].fill_(2.0)
    state.own["n"] = 2.0  # type: ignore[index]
    on.saver.reserve(state_of(3.0))
    assert not on.saver.wait(timeout_s=0)
    assert on.saver.durable_step is None
    on.end()
    assert on.values == {1: (1.0, 1.0)}
    assert on.saver.durable_step == 1
    kinds = ["save_started", "save_staged", "save_written", "save_committed"]
    assert [event.kind.value for event in on.told] == kinds
    assert {event.state_bytes for event in on.told[1:]} == {4000}
    assert sorted(event.mono_ns for event in on.told) == [event.mono_ns for event in on.told]


def test_one_that_comes_too_soon_is_skipped_and_told(tmp_path: Path) -> None:
    """While a save is under way the next periodic one costs the training nothing, and is on
    record. save() comes back with a committed checkpoint, after the one that was under way."""
    on = Saving(tmp_path, HeldDisk(1))
    on.start(1)
    assert on.start(2) == 0.0
    assert on.told[-1].kind is EventKind.SAVE_SKIPPED
    assert (on.told[-1].step, on.told[-1].reason) == (2, "the save of step 1 is still under way")
    threading.Timer(0.05, on.disk.let_go.set).start()
    saved = on.saver.save(state_of(3.0), step=3, epoch=4, meta={"why": "test"})
    assert saved.is_committed
    assert saved.checkpoint is not None
    manifest = saved.checkpoint.manifest
    assert (manifest.kind, manifest.epoch, manifest.meta) == ("manual", 4, {"why": "test"})
    assert on.steps == [1, 3]


@pytest.mark.parametrize("options", [{}, {"room": no_room}], ids=["copied", "not copied"])
def test_a_failure_is_reported_once(tmp_path: Path, options: Any) -> None:
    """With "warn" the next safe point warns and the training goes on, with "fail" it raises; save()
    raises itself. What was committed stays, and the next one is tried."""
    on = Saving(tmp_path / "a", BrokenDisk(2), **options)
    for step in (1, 2):
        on.start(step)
        on.saver.wait()
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        on.saver.poll()
    on.saver.poll()
    with pytest.raises(SaveFailed, match="No space left"):
        on.saver.save(state_of(2.0), step=2)
    on.start(3)
    on.end()
    assert on.steps == [1, 3]
    fails = Saving(tmp_path / "b", BrokenDisk(2), on_save_error="fail", **options)
    fails.start(2)
    fails.saver.wait()
    with pytest.raises(SaveFailed, match="No space left on device"):
        fails.saver.poll()
    fails.end()


def test_what_is_wrong_costs_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that cannot be recorded and old checkpoints that cannot be removed are warnings; the
    checkpoint is committed."""

    class StickyDisk(Storage):
        def rmdir(self, path: Path) -> None:
            raise PermissionError(1, "Operation not permitted", str(path))

    on = Saving(tmp_path, StickyDisk(), retention=Retention(keep=1, keep_stop=0))
    for step in (1, 2):
        on.saver.save(state_of(step), step=step)
    monkeypatch.setattr(on, "told", None)  # so that nothing can be appended
    on.start(3)
    with pytest.warns(RuntimeWarning, match="removed|was not recorded") as caught:
        on.end()
    said = " ".join(str(one.message) for one in caught)
    assert "removed" in said
    assert "was not recorded" in said
    assert on.steps[-1] == 3


def test_the_callers_own_mistakes_are_raised_at_once(tmp_path: Path) -> None:
    """What cannot be saved, by every kind of save; a word that on_save_error does not know; nothing
    that is to be kept."""
    on = Saving(tmp_path)
    bad = State(shared={}, own={"thing": object()})
    for save in (on.saver.start, on.saver.save):
        with pytest.raises(UnsavableState):
            save(bad, step=1)
    with pytest.raises(UnsavableState):
        on.stop(1, state=bad)
    on.end()
    with pytest.raises(UsageError, match="keep=0"):
        Saver(on.store, retention=Retention(keep=0))
    with pytest.raises(UsageError, match="ignore"):
        Saver(on.store, on_save_error="ignore")  # type: ignore[arg-type]


class Interrupted(Exception):
    """As a signal handler raises it, KeyboardInterrupt for one."""


def test_an_interrupted_save_leaves_the_state_to_the_caller(tmp_path: Path) -> None:
    """When an exception from a signal handler ends save(), nobody reads the state any more and
    nothing is committed."""
    on = Saving(tmp_path, HeldDisk(1))

    def handler(*_: object) -> None:
        on.disk.let_go.set()
        raise Interrupted

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            on.saver.save(state_of(1.0), step=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert on.saver.wait(timeout_s=0)
    on.saver.poll()
    assert on.steps == []


def test_a_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    """In a child poll, wait and close do nothing and saving is refused, also while the parent
    saves; the parent's save is not disturbed."""
    on = Saving(tmp_path, HeldDisk(1))
    on.start(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        pid = os.fork()
    if pid == 0:
        on.saver.poll()
        took_part = not on.saver.wait()
        on.saver.close()
        for save in (on.saver.start, on.saver.save):
            with contextlib.suppress(UsageError):
                save(state_of(9.0), step=9)
                took_part = True
        os._exit(took_part)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    on.end()
    assert on.steps == [1]


BUSY = """
        import sys, threading, torch, hydroslurm
        from pathlib import Path
        from hydroslurm.checkpoint.saver import Saver
        from hydroslurm.checkpoint.storage import Storage
        from hydroslurm.checkpoint.store import CheckpointStore, State

        free = threading.Event()

        class Busy(Storage):
            def create(self, path):
                assert free.wait(60)
                return super().create(path)

        store = CheckpointStore(Path(sys.argv[1]), storage=Busy())
"""


def test_a_process_that_ends_has_its_last_save(tmp_path: Path) -> None:
    """A program that runs off its end with a save under way, the disk busy until Python shuts down,
    leaves a committed checkpoint."""
    code = """
        saver = Saver(store)
        saver.start(State(shared={"m": {"w": torch.ones(9)}}, own={}), step=1)
        threading._register_atexit(free.set)  # called before what was registered earlier
        print("leaving")
    """
    with forked(BUSY + code, tmp_path, str(tmp_path / "store")) as program:
        program.expect("leaving")
        assert program.wait() == 0, str(program)
    assert [one.step for one in CheckpointStore(tmp_path / "store").committed()] == [1]


@pytest.mark.parametrize("gate", ["native", "hooks"])
def test_a_pause_does_not_hold_a_save(tmp_path: Path, gate: str) -> None:
    """A save that is under way when the rank is parked finishes, through the gate's exempt()."""
    code = """
        torch.set_num_threads(1)
        committed = threading.Event()
        model = torch.nn.Linear(8, 8)
        controller = hydroslurm.install(gate=sys.argv[2])

        def tell(event):
            if event.kind.value == "save_committed":
                committed.set()

        def pause():
            controller.pause(wait_s=60)
            free.set()
            assert committed.wait(60)
            print("committed while", controller.state.name)
            controller.resume(wait_s=60)

        saver = Saver(store, exempt=controller.exempt, tell=tell)
        saver.start(State(shared={"model": model.state_dict()}, own={}), step=1)
        pauser = threading.Thread(target=pause)
        pauser.start()
        while pauser.is_alive():
            model(torch.ones(8))
        saver.close()
    """
    with forked(BUSY + code, tmp_path, str(tmp_path / gate), gate) as program:
        assert program.expect("committed while") == "PARKED"
        assert program.wait() == 0, str(program)


def test_without_memory_for_a_copy_the_training_waits(tmp_path: Path) -> None:
    """No copy is made; the save is committed when the training goes on, with the same bytes on disk
    as one of a copy, and why is told at the start and with each save."""
    copied, waited = Saving(tmp_path / "copied"), Saving(tmp_path / "waited", room=no_room)
    assert copied.saver.reserve(state_of(1.0)) == ""
    why = waited.saver.reserve(state_of(1.0))
    assert "and 0 MB may be taken (0 of 0 MB of the limit of a test are in use)" in why
    files = []
    for on in (copied, waited):
        state = state_of(1.0)
        assert on.start(1, state) > 0
        assert (on.saver._staging.reserved_bytes == 0) == (on is waited)
        assert on.saver.wait() if on is copied else on.saver.durable_step == 1
        state.shared["model"]["w"].fill_(2.0)
        on.end()
        folder = on.store.committed()[0].path
        files.append({f.name: f.read_bytes() for f in folder.iterdir() if "manifest" not in f.name})
        assert on.values == {1: (1.0, 1.0)}
    assert files[0] == files[1]
    (not_copied,) = [one for one in waited.told if one.kind is EventKind.SAVE_NOT_COPIED]
    assert not_copied.reason == why


def test_a_stop_during_a_save_takes_no_second_copy(tmp_path: Path) -> None:
    """There was memory for one copy, which the save under way is reading: the stop writes the state
    itself, and both are committed."""
    left = [10**6]
    on = Saving(
        tmp_path,
        HeldDisk(1),
        room=lambda: Room(left[0], 10**6, 0, "the limit of a test"),
        retention=Retention(keep=3),
    )
    on.start(1)
    left[0] = 0
    threading.Timer(0.1, on.disk.let_go.set).start()
    saved = on.stop(2)
    assert saved.is_committed
    on.end()
    assert on.values == {1: (1.0, 1.0), 2: (2.0, 2.0)}


# --- before a deadline

STOP_BEGINS = ("stop", EventKind.SAVE_STARTED)


def expect(saver: Saver, *, seconds: float) -> None:
    """As if a save had taken so long."""
    saver._pace.add(seconds, state_bytes=4000)


def test_with_time_enough_the_stop_is_durable(quick_folder: Path) -> None:
    """The state is committed as a stop, nothing is at risk, and the choice is in words. Without any
    deadline, too, on which no wait may overflow. What it took is expected of the next one, and by
    the next attempt."""
    on = Saving(quick_folder)
    saved = on.stop(5, state=lambda: state_of(5.0), epoch=1, meta={"why": "test"})
    assert saved.is_committed
    assert saved.reason.startswith("step 5 is committed; a full save needs about 1.0 s of the")
    assert saved.checkpoint is not None
    assert (saved.checkpoint.kind, saved.checkpoint.manifest.meta) == ("stop", {"why": "test"})
    assert on.values == {5: (5.0, 5.0)}
    assert on.stop(6, left_s=math.inf).is_committed
    assert Saver(on.store).expect_s() < ASSUMED_FIXED_S
    assert on.saver.expect_s() < ASSUMED_FIXED_S


@pytest.mark.parametrize(
    ("expected_s", "left_s", "says", "committed"),
    [
        # the periodic save is committed first, then the stop's
        ((), 600, "both fit", [4, 5]),
        # 1.5 times each of the two does not fit: the older one is given up
        ((20.0,), 40, "that one is given up", [5]),
        # 2 s are left for the one under way, which hangs: it does not cost the stop its own save
        ((0.01, 20.0), 32, "both fit", [5]),
    ],
)
def test_one_under_way(
    tmp_path: Path, expected_s: tuple[float, ...], left_s: float, says: str, committed: list[int]
) -> None:
    """It is waited for where both fit. One that is given up ends without a commit when a hung disk
    comes back, and is told as given up and not as failed."""
    both = committed == [4, 5]
    on = Saving(tmp_path, HeldDisk(4), until=STOP_BEGINS if both else None)
    for seconds in expected_s[:1]:
        expect(on.saver, seconds=seconds)
    on.start(4)
    for seconds in expected_s[1:]:
        expect(on.saver, seconds=seconds)
    saved = on.stop(5, left_s)
    assert saved.is_committed
    assert saved.reason.endswith(says)
    on.end()
    assert on.steps_told(EventKind.SAVE_COMMITTED) == on.steps == committed
    assert on.values[5] == (5.0, 5.0)
    assert len([*tmp_path.iterdir()]) == len(committed)
    assert on.steps_told(EventKind.SAVE_ABANDONED) == ([] if both else [4])
    assert on.steps_told(EventKind.SAVE_STAGED) == [4]  # the stop makes no copy


def test_a_disk_that_has_just_become_slow(tmp_path: Path) -> None:
    """A sync that hangs counts at once, and still when its save has failed."""
    on = Saving(tmp_path, HeldDisk(2, call="fsync", error=errno.EIO))
    on.saver.save(state_of(1.0), step=1)
    wait_s = 10 * on.saver.expect_s()
    on.start(2)
    time.sleep(wait_s)
    assert on.saver.expect_s() >= wait_s
    on.disk.let_go.set()
    assert on.saver.wait(timeout_s=60)
    with pytest.warns(RuntimeWarning, match="Input/output error"):
        on.saver.poll()
    assert on.steps == [1]
    assert on.saver.expect_s() >= wait_s
    on.end()


def test_a_state_is_not_saved_twice(tmp_path: Path) -> None:
    """A periodic save of the very state is waited for, beyond the deadline too. A committed one, of
    this attempt or that the run continued from, is as good as durable."""
    on = Saving(tmp_path, HeldDisk(5), until=STOP_BEGINS)
    on.start(5)
    saved = on.stop(5, unchanged=True)
    assert saved.is_committed
    assert "the save in flight is of this very step 5" in saved.reason
    assert [one.name for one in tmp_path.iterdir()] == ["step-000000005"]
    later = Saver(on.store)
    later.continues_from(on.store.committed()[-1])
    for saver in (on.saver, later):
        saved = saver.save_by(state_of(5.0), step=5, deadline_mono_s=0.0, unchanged=True)
        assert saved.is_committed
        assert saved.reason.endswith("step 5 is committed already")
    assert on.steps_told(EventKind.SAVE_COMMITTED) == on.steps == [5]
    late = Saving(tmp_path, HeldDisk(6))
    late.start(6)
    assert not late.stop(6, -1, unchanged=True).is_committed
    late.end()
    assert late.steps_told(EventKind.SAVE_COMMITTED) == [6]
    assert late.steps == [5, 6]


def test_a_stop_does_not_wait_for_old_ones_to_be_removed(tmp_path: Path) -> None:
    """What is durable is told at once; the removal of older checkpoints comes after, and is waited
    for by close()."""
    on = Saving(tmp_path, HeldDisk(1, 2, call="unlink"), retention=Retention(keep=1, keep_stop=1))
    for step in (1, 2, 3):
        write(on.store, state_of(step), step=step, kind="stop")
    saved = on.stop(5)
    assert saved.is_committed
    assert not on.saver.wait(timeout_s=0)
    on.end()
    assert on.steps == [3, 5]


def test_a_state_that_may_have_changed_is_saved_again_at_its_step(tmp_path: Path) -> None:
    """The one before stays until the new one is committed, which is the newer one; where there is
    no time for it, the one before is what is kept, and that is said."""
    on = Saving(tmp_path, HeldDisk(5))
    on.disk.let_go.set()
    on.saver.save(state_of(5.0), step=5)
    assert Saving(tmp_path).stop(5, state=state_of(6.0)).is_committed
    names = [one.path.name for one in on.store.committed()]
    assert names == ["step-000000005", "step-000000005.2"]
    found = newest_good(on.store)
    assert found is not None
    assert on.values == {5: (6.0, 6.0)}
    alone = Saving(tmp_path, on.disk)
    alone.saver.continues_from(found)
    on.disk.let_go.clear()
    saved = alone.stop(5, -1, state_of(8.0))
    assert not saved.is_committed
    assert f"what is kept is an earlier save of this step ({found.path})" in saved.reason
    alone.end()


def test_a_stop_follows_a_save_of_its_step(tmp_path: Path) -> None:
    """A periodic save has just begun when a stop saves the same step with another state: that of
    the stop is the newer checkpoint, also where the one before is given up and commits last."""
    on = Saving(tmp_path / "early", LateFolder())
    on.disk.is_armed = True
    on.start(5)
    assert on.stop(5, state=state_of(6.0)).is_committed
    on.end()
    assert on.steps == [5, 5]
    assert on.values == {5: (6.0, 6.0)}
    late = Saving(tmp_path / "late", HeldDisk(5, call="rename"))
    expect(late.saver, seconds=20.0)
    late.start(5)
    saved = late.stop(5, 40, state_of(6.0))
    assert saved.is_committed
    assert saved.reason.endswith("that one is given up")
    late.end()
    assert late.steps == [5, 5]
    assert late.values == {5: (6.0, 6.0)}


def test_the_caller_has_control_at_the_deadline(tmp_path: Path) -> None:
    """With a disk that hangs the stop comes back, says what is kept and lost, and the save goes on,
    after an older one that is under way: it is committed with the state of the stop when the disk
    does."""
    on = Saving(tmp_path, HeldDisk(4, 5), retention=Retention(keep=9))
    on.saver.save(state_of(3.0), step=3)
    expect(on.saver, seconds=20.0)
    on.start(4)
    saved = on.stop(5, -1)
    assert not saved.is_committed
    assert not on.saver.wait(timeout_s=0)
    assert saved.checkpoint is not None
    assert saved.checkpoint.step == 3
    assert saved.reason.startswith(
        "step 5 is not committed: the save is still under way; step 3 is committed"
    )
    on.end()
    assert on.values == {step: (step, step) for step in (3, 4, 5)}


def test_a_stop_that_goes_wrong(tmp_path: Path) -> None:
    """A full disk leaves the caller its grace: what is kept is said, and poll does not repeat it.
    An error in state_dict() is raised after the save under way was waited for."""
    on = Saving(tmp_path, BrokenDisk(5))
    saved = on.stop(5)
    assert (saved.is_committed, saved.checkpoint) == (False, None)
    assert "the save failed" in saved.reason
    assert "No space left" in saved.reason
    on.saver.poll()

    def broken() -> None:
        raise KeyError("momentum")

    on.start(6)
    with pytest.raises(KeyError, match="momentum"):
        on.stop(7, state=broken)
    assert on.steps == [6]
