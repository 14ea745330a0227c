"""Saves beside the training: what is committed, what is reported, and who waits for whom."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoint.disks import BrokenDisk, HeldDisk
from zygote import forked

from hydroslurm.checkpoint.deadline import ASSUMED_FIXED_S
from hydroslurm.checkpoint.outcome import SaveEvent
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State
from hydroslurm.core.events import EventKind
from hydroslurm.core.memory import Room
from hydroslurm.errors import SaveFailed, UnsavableState, UsageError


def state_of(value: float) -> State:
    return State(shared={"model": {"w": torch.full((1000,), value)}}, own={"n": value})


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.committed()]


def value_at(store: CheckpointStore, step: int) -> tuple[float, float]:
    """What the tensor and the plain value were when a step was saved."""
    checkpoint = next(one for one in store.committed() if one.step == step)
    state = store.load(checkpoint)
    values = state.shared["model"]["w"].unique()
    assert len(values) == 1
    return float(values), state.own["n"]


def test_training_goes_on_at_once(tmp_path: Path) -> None:
    """What training changes while the save is held on the disk is not in the checkpoint."""
    disk = HeldDisk(1)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    state = state_of(1.0)
    assert saver.start(state, step=1) > 0
    assert disk.reached.wait(60)
    state.shared["model"]["w"].fill_(2.0)
    state.own["n"] = 2.0  # type: ignore[index]
    assert not saver.wait(timeout_s=0)
    assert saver.durable_step is None
    disk.let_go.set()
    saver.close()
    assert value_at(store, 1) == (1.0, 1.0)
    assert saver.durable_step == 1


def test_one_that_comes_too_soon_is_skipped_and_told(tmp_path: Path) -> None:
    """While a save is under way the next periodic one costs the training nothing, and is on
    record."""
    disk, told = HeldDisk(1), list[SaveEvent]()
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store, tell=told.append)
    saver.start(state_of(1.0), step=1)
    assert saver.start(state_of(2.0), step=2) == 0.0
    assert told[-1].kind is EventKind.SAVE_SKIPPED
    assert (told[-1].step, told[-1].reason) == (2, "the save of step 1 is still under way")
    disk.let_go.set()
    saver.wait()
    saver.start(state_of(3.0), step=3)
    saver.close()
    assert steps(store) == [1, 3]


def test_what_is_told(tmp_path: Path) -> None:
    """A save tells when it begins, when the training goes on, when the files are on the disk, and
    when the checkpoint is committed."""
    told = list[SaveEvent]()
    saver = Saver(CheckpointStore(tmp_path), tell=told.append)
    saver.start(state_of(1.0), step=1)
    saver.close()
    assert [event.kind.value for event in told] == [
        "save_started",
        "save_staged",
        "save_written",
        "save_committed",
    ]
    assert {event.state_bytes for event in told[1:]} == {4000}
    assert sorted(event.mono_ns for event in told) == [event.mono_ns for event in told]


def test_a_failure_is_reported_once(tmp_path: Path) -> None:
    """With "warn" the next safe point warns and the training goes on; what was committed stays."""
    store = CheckpointStore(tmp_path, storage=BrokenDisk(2))
    saver = Saver(store)
    saver.start(state_of(1.0), step=1)
    saver.wait()
    saver.start(state_of(2.0), step=2)
    saver.wait()
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        saver.poll()
    saver.poll()
    saver.start(state_of(3.0), step=3)
    saver.close()
    assert steps(store) == [1, 3]


def test_a_failure_ends_the_training_where_that_is_wanted(tmp_path: Path) -> None:
    """With "fail" the next safe point raises, once."""
    saver = Saver(CheckpointStore(tmp_path, storage=BrokenDisk(2)), on_save_error="fail")
    saver.start(state_of(2.0), step=2)
    saver.wait()
    with pytest.raises(SaveFailed, match="No space left on device"):
        saver.poll()
    saver.close()


def test_a_wrong_word_is_refused(tmp_path: Path) -> None:
    """on_save_error knows two words, and at least one checkpoint is kept."""
    with pytest.raises(UsageError, match="keep=0"):
        Saver(CheckpointStore(tmp_path), retention=Retention(keep=0))
    with pytest.raises(UsageError, match="ignore"):
        Saver(CheckpointStore(tmp_path), on_save_error="ignore")  # type: ignore[arg-type]


def test_an_object_that_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    """The caller's own mistake is raised where it is made, by every kind of save."""
    saver = Saver(CheckpointStore(tmp_path))
    bad = State(shared={}, own={"thing": object()})
    with pytest.raises(UnsavableState):
        saver.start(bad, step=1)
    with pytest.raises(UnsavableState):
        saver.save(bad, step=1)
    with pytest.raises(UnsavableState):
        saver.save_by(bad, step=1, deadline_mono_s=time.monotonic() + 60)
    saver.close()


def test_save_waits_its_turn_and_is_durable(tmp_path: Path) -> None:
    """save() comes back with a committed checkpoint, after the one that was under way."""
    disk = HeldDisk(1)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    saver.start(state_of(1.0), step=1)
    threading.Timer(0.05, disk.let_go.set).start()
    saved = saver.save(state_of(2.0), step=2, epoch=4, meta={"why": "test"})
    assert (saved.is_committed, saved.steps_at_risk, saved.still_writing) == (True, 0, False)
    assert saved.checkpoint is not None
    manifest = saved.checkpoint.manifest
    assert (manifest.kind, manifest.epoch, manifest.meta) == ("manual", 4, {"why": "test"})
    assert steps(store) == [1, 2]


def test_save_raises_what_went_wrong(tmp_path: Path) -> None:
    """save() reports its failure itself; poll does not repeat it."""
    saver = Saver(CheckpointStore(tmp_path, storage=BrokenDisk(2)))
    with pytest.raises(SaveFailed, match="No space left"):
        saver.save(state_of(2.0), step=2)
    saver.close()


class Interrupted(Exception):
    """As a signal handler raises it, KeyboardInterrupt for one."""


@contextmanager
def alarm_that(handler: object) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)  # type: ignore[arg-type]
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_interrupted_save_leaves_the_state_to_the_caller(tmp_path: Path) -> None:
    """When an exception from a signal handler ends save(), nobody reads the state any more and
    nothing is committed."""
    disk = HeldDisk(1)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)

    def handler(*_: object) -> None:
        disk.let_go.set()
        raise Interrupted

    with alarm_that(handler):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(Interrupted):
            saver.save(state_of(1.0), step=1)
    assert saver.wait(timeout_s=0)
    saver.poll()
    assert steps(store) == []


def test_an_error_of_the_listener_costs_no_save(tmp_path: Path) -> None:
    """An event that cannot be recorded is a warning; the checkpoint is committed."""

    def tell(event: SaveEvent) -> None:
        raise ValueError("no log")

    store = CheckpointStore(tmp_path)
    saver = Saver(store, tell=tell)
    saver.start(state_of(1.0), step=1)
    saver.wait()
    with pytest.warns(RuntimeWarning, match="no log"):
        saver.poll()
    assert steps(store) == [1]


def test_reserving_beside_a_save(tmp_path: Path) -> None:
    """Memory may be had in advance at any moment; a save that is under way keeps its copy."""
    disk = HeldDisk(1)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    saver.start(state_of(1.0), step=1)
    saver.reserve(state_of(1.0))
    disk.let_go.set()
    saver.wait()
    saver.reserve(state_of(2.0))
    saver.start(state_of(2.0), step=2)
    saver.close()
    assert [value_at(store, step)[0] for step in (1, 2)] == [1.0, 2.0]


def test_a_forked_child_has_no_part_in_it(tmp_path: Path) -> None:
    """In a child poll, wait and close do nothing and saving is refused, also while the parent
    saves; the parent's save is not disturbed."""
    disk = HeldDisk(1)
    store = CheckpointStore(tmp_path, storage=disk)
    saver = Saver(store)
    saver.start(state_of(1.0), step=1)
    assert disk.reached.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            saver.poll()
            assert saver.wait()
            saver.close()
            for save in (saver.start, saver.save):
                try:
                    save(state_of(9.0), step=9)
                except UsageError:
                    continue
                os._exit(2)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    disk.let_go.set()
    saver.close()
    assert steps(store) == [1]


def test_a_process_that_ends_has_its_last_save(tmp_path: Path) -> None:
    """A program that runs off its end with a save under way, the disk busy until Python shuts down,
    leaves a committed checkpoint."""
    code = """
        import sys, threading, torch
        from pathlib import Path
        from hydroslurm.checkpoint.saver import Saver
        from hydroslurm.checkpoint.storage import Storage
        from hydroslurm.checkpoint.store import CheckpointStore, State

        shutdown = threading.Event()

        class Busy(Storage):
            def create(self, path):
                assert shutdown.wait(60)
                return super().create(path)

        store = CheckpointStore(Path(sys.argv[1]), storage=Busy())
        saver = Saver(store)
        saver.start(State(shared={"m": {"w": torch.ones(9)}}, own={}), step=1)
        threading._register_atexit(shutdown.set)  # called before what was registered earlier
        print("leaving")
    """
    with forked(code, tmp_path, str(tmp_path / "store")) as program:
        program.expect("leaving")
        assert program.wait() == 0, str(program)
    assert steps(CheckpointStore(tmp_path / "store")) == [1], str(program)


def test_a_pause_does_not_hold_a_save(tmp_path: Path) -> None:
    """A save that is under way when the rank is parked finishes, through the native gate's and the
    hooks' exempt()."""
    code = """
        import sys, threading, torch, hydroslurm
        from pathlib import Path
        from hydroslurm.checkpoint.saver import Saver
        from hydroslurm.checkpoint.storage import Storage
        from hydroslurm.checkpoint.store import CheckpointStore, State

        torch.set_num_threads(1)
        parked, committed = threading.Event(), threading.Event()

        class Busy(Storage):
            def create(self, path):
                assert parked.wait(60)
                return super().create(path)

        model = torch.nn.Linear(8, 8)
        hydroslurm.install(gate=sys.argv[2])
        controller = hydroslurm.controller()

        def tell(event):
            if event.kind.value == "save_committed":
                committed.set()

        def pause():
            controller.pause(wait_s=60)
            parked.set()
            assert committed.wait(60)
            print("committed while", controller.state.name)
            controller.resume(wait_s=60)

        store = CheckpointStore(Path(sys.argv[1]), storage=Busy())
        saver = Saver(store, exempt=controller.exempt, tell=tell)
        saver.start(State(shared={"model": model.state_dict()}, own={}), step=1)
        pauser = threading.Thread(target=pause)
        pauser.start()
        while pauser.is_alive():
            model(torch.ones(8))
        saver.close()
    """
    for gate in ("native", "hooks"):
        with forked(code, tmp_path, str(tmp_path / gate), gate) as program:
            assert program.expect("committed while") == "PARKED"
            assert program.wait() == 0, str(program)


def test_how_long_it_takes_is_known_from_earlier_attempts(quick_folder: Path) -> None:
    """Assumed at first, then measured; the next attempt begins with what the manifests say."""
    # a disk whose last syncs were slower than a whole save would be believed instead
    store = CheckpointStore(quick_folder)
    saver = Saver(store)
    assert saver.expect_s() == ASSUMED_FIXED_S
    saver.save(state_of(1.0), step=1)
    assert Saver(store).expect_s() < saver.expect_s() < ASSUMED_FIXED_S


class StickyDisk(Storage):
    """Cannot remove anything."""

    def rmdir(self, path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))


def test_old_ones_that_stay_are_a_warning(tmp_path: Path) -> None:
    """When retention fails the save is committed, and somebody hears that the disk fills up."""
    store = CheckpointStore(tmp_path, storage=StickyDisk())
    saver = Saver(store, retention=Retention(keep=1, keep_stop=0))
    for step in (1, 2):
        saver.save(state_of(step), step=step)
    saver.start(state_of(3.0), step=3)
    with pytest.warns(RuntimeWarning, match="removed"):
        saver.close()
    assert steps(store)[-1] == 3


def no_room() -> Room:
    return Room(free_bytes=3000, limit_bytes=10_000, used_bytes=6000, bound="the limit of a test")


def test_without_memory_for_a_copy_the_training_waits(tmp_path: Path) -> None:
    """No copy is made; the save is committed when the training goes on, with the same bytes on disk
    as one of a copy, and why is told at the start and with each save."""
    stores = [CheckpointStore(tmp_path / name) for name in ("copied", "waited")]
    events: list[SaveEvent] = []
    savers = [Saver(stores[0]), Saver(stores[1], room=no_room, tell=events.append)]
    told = [saver.reserve(state_of(1.0)) for saver in savers]
    assert told[0] == ""
    assert "and 0 MB may be taken (0 of 0 MB of the limit of a test are in use)" in told[1]
    files = []
    for store, saver in zip(stores, savers, strict=True):
        state = state_of(1.0)
        assert saver.start(state, step=1) > 0
        assert saver._staging.reserved_bytes > 0 or saver is savers[1]
        assert saver.wait() if saver is savers[0] else saver.durable_step == 1
        state.shared["model"]["w"].fill_(2.0)
        saver.close()
        folder = store.committed()[0].path
        files.append({f.name: f.read_bytes() for f in folder.iterdir() if "manifest" not in f.name})
        assert value_at(store, 1) == (1.0, 1.0)
    (not_copied,) = [one for one in events if one.kind is EventKind.SAVE_NOT_COPIED]
    assert not_copied.reason == told[1]
    assert savers[1]._staging.reserved_bytes == 0
    assert files[0] == files[1]


def test_a_save_without_a_copy_that_fails_is_reported_like_others(tmp_path: Path) -> None:
    """The training is not ended by it, and the next one is tried."""
    store = CheckpointStore(tmp_path, storage=BrokenDisk(1))
    saver = Saver(store, room=no_room)
    saver.start(state_of(1.0), step=1)
    with pytest.warns(RuntimeWarning, match="No space left"):
        saver.poll()
    saver.start(state_of(2.0), step=2)
    saver.close()
    assert steps(store) == [2]


def test_a_stop_during_a_save_takes_no_second_copy(tmp_path: Path) -> None:
    """There was memory for one copy, which the save under way is reading: the stop writes the state
    itself, and both are committed."""
    disk, left = HeldDisk(1), [10**6]
    store = CheckpointStore(tmp_path, storage=disk)

    def room() -> Room:
        return Room(left[0], 10**6, 0, "the limit of a test")

    saver = Saver(store, room=room, retention=Retention(keep=3))
    saver.start(state_of(1.0), step=1)
    left[0] = 0
    assert disk.reached.wait(60)
    threading.Timer(0.1, disk.let_go.set).start()
    saved = saver.save_by(state_of(2.0), step=2, deadline_mono_s=time.monotonic() + 600)
    assert (saved.is_committed, saved.still_writing) == (True, False)
    saver.close()
    assert [value_at(store, step) for step in steps(store)] == [(1.0, 1.0), (2.0, 2.0)]
