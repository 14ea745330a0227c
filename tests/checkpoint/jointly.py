"""A program that saves with several real ranks, has them killed or their disks fail, and looks.

    jointly.py FOLDER SCENE    lines, then "done ROUNDS"

It loads torch once and forks the ranks.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.disks import HeldDisk, Saving
from checkpoint.faulty import CountingStorage, failing, killing
from checkpoint.pipepeers import PipePeers, together
from checkpoint.states import revoked_from_anybody, same, state_of, write

from hydroslurm.checkpoint import checksummed_file, folders
from hydroslurm.checkpoint import save as save_module
from hydroslurm.checkpoint.storage import Storage
from hydroslurm.checkpoint.store import Checkpoint, CheckpointStore, Retention, State, newest_good
from hydroslurm.core.events import EventKind
from hydroslurm.core.fence import Fence
from hydroslurm.core.memory import Room
from hydroslurm.errors import (
    CheckpointCorrupt,
    CheckpointError,
    SaveAbandoned,
    SaveFailed,
    StaleAttempt,
    UnsavableState,
)

RANKS = 3
COMMITTED, NOT_SAVED, NOT_KNOWN, ABANDONED, STALE = 0, 3, 4, 5, 6
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


def save(folder: Path, peers: PipePeers, step: int, storage: Storage | None = None) -> int:
    """One rank's save; how it ended, which is also looked up in the words. A rank that is alone
    removes old ones, too."""
    is_alone = peers.world_size == 1
    store = CheckpointStore(
        folder, storage=storage, peers=None if is_alone else peers, patience_s=60
    )
    for before in CheckpointStore(folder).committed():
        store.frozen.note(before)
    state = joint_state(step, peers.rank)
    try:
        found = write(store, state, step=step, kind="periodic", topic=f"save {step}")
    except SaveAbandoned:
        return ABANDONED
    except SaveFailed as error:
        print(f"rank {peers.rank}: {error}", flush=True)
        return NOT_KNOWN if "not known" in str(error) else NOT_SAVED
    assert found.step == step
    assert found.manifest.world_size == peers.world_size
    if is_alone:
        store.prune(Retention(keep=2))
    return COMMITTED


def saved(folder: Path, *steps: int, ranks: int = RANKS) -> None:
    """All ranks save these steps."""
    for step in steps:
        ended = together(ranks, lambda peers, step=step: save(folder, peers, step))
        assert ended == [COMMITTED] * ranks, ended


def dying(folder: Path, step: int, *deaths: tuple[int, str, str]) -> list[int]:
    """A save in which ranks are killed, each ``(rank, "before" or "after", end of a topic)``."""

    def work(peers: PipePeers) -> int:
        def hook(when: str, topic: str) -> None:
            if any((peers.rank, when) == one[:2] and topic.endswith(one[2]) for one in deaths):
                os.kill(os.getpid(), signal.SIGKILL)

        peers.hook = hook
        return save(folder, peers, step, CountingStorage())

    return together(RANKS, work)


def refused(folder: Path, save_it: Callable[[PipePeers], object]) -> str:
    """What all ranks are told, the same, of a save that fails on all of them and leaves nothing;
    with the error, which differs on a rank that alone knows better."""
    folder.mkdir(parents=True)

    def work(peers: PipePeers) -> int:
        try:
            save_it(peers)
        except CheckpointError as error:
            (folder / f"words-{peers.rank}").write_text(f"{type(error).__name__}: {error}")
        return 0

    assert together(RANKS, work) == [0] * RANKS
    words = {(folder / f"words-{rank}").read_text() for rank in range(RANKS)}
    assert len({one.partition(": ")[2] for one in words}) == 1
    assert not any((folder / "c").glob("*"))
    return "\n".join(sorted(words))


def look(folder: Path, *steps: int) -> int:
    """The newest good checkpoint, which is of one of these steps, whole, bit for bit."""
    store = CheckpointStore(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = newest_good(store)
    assert found is not None
    assert found.step in steps, f"{found.step} instead of one of {steps}"
    assert holds(store, found, found.step), f"step {found.step} came back changed"
    return found.step


def holds(store: CheckpointStore, found: Checkpoint, step: int) -> bool:
    state = store.load(found)
    wanted = joint_state(step, 0)
    return same(dict(state.shared), dict(wanted.shared)) and all(
        same(dict(store.load_own(found, rank)), dict(joint_state(step, rank).own))
        for rank in range(found.manifest.world_size)
    )


# --- faults, and what is there after each


class Rounds:
    """Saves of which something goes wrong; what is there afterwards is the old state or the new."""

    def __init__(self, folder: Path, *, ranks: int = RANKS) -> None:
        self.folder, self.ranks, self.old, self.count = folder, ranks, 2, 0
        saved(folder, 1, 2, ranks=ranks)

    def fault(self, name: str, victim: int, fault: Fault) -> None:
        """A save in which a rank has this storage."""

        def work(peers: PipePeers, new: int = self.old + 1) -> int:
            return save(self.folder, peers, new, fault(peers) if peers.rank == victim else None)

        self.see(name, victim, lambda: together(self.ranks, work))

    def see(self, name: str, victim: int, save_it: Callable[[], list[int]]) -> None:
        old, new = self.old, self.old + 1
        ended = save_it()
        there = look(self.folder, old, new)
        print(f"round {name} of rank {victim}: {ended}, step {there - old} ahead", flush=True)
        told = {code for code in ended if code != SIGKILLED}
        assert len(told) == 1 or self.ranks == 1, f"{name}: the ranks tell {ended}"
        if COMMITTED in told:
            assert there == new, f"{name}: committed, and not there"
        if NOT_SAVED in told:
            assert there == old, f"{name}: not saved, and there"
        assert not self.leftovers() or ended[victim] == SIGKILLED, f"{name}: {self.leftovers()}"
        if there == old:  # the run goes on, and the next look is at this one
            saved(self.folder, new, ranks=self.ranks)
        CheckpointStore(self.folder).prune(Retention(keep=2))
        assert not self.leftovers() or self.ranks > 1, f"{name}: {self.leftovers()}"
        self.old = new
        self.count += 1

    def leftovers(self) -> list[str]:
        return [path.name for path in self.folder.iterdir() if path.name.startswith(".")]

    def calls_of(self, victim: int) -> int:
        """How many I/O calls a rank makes in a save."""
        self.old += 1
        counted = self.folder.with_name("calls")

        def work(peers: PipePeers) -> None:
            storage = CountingStorage()
            assert save(self.folder, peers, self.old, storage) == COMMITTED
            if peers.rank == victim:
                counted.write_text(str(len(storage.calls)))
                assert "link" in storage.calls or self.ranks > 1

        assert together(self.ranks, work) == [0] * self.ranks
        return int(counted.read_text())


def kills_alone(folder: Path) -> int:
    """SIGKILL at every I/O call of a process that saves, in many writes, and removes old ones."""
    checksummed_file.CHUNK_BYTES = 1 << 15
    rounds = Rounds(folder / "checkpoints", ranks=1)
    for at in range(1, rounds.calls_of(0) + 1):
        rounds.fault(f"kill at {at}", 0, lambda _, at=at: killing(at))
    return rounds.count


def kills_at_calls(folder: Path) -> int:
    """SIGKILL at every I/O call of one rank; at every third one where there are many."""
    rounds = Rounds(folder / "checkpoints")
    for rank in (0, 1):
        total = rounds.calls_of(rank)
        for at in range(1, total + 1, 1 if total < 40 else 3):
            rounds.fault(f"kill at {at}", rank, lambda _, at=at: killing(at))
    return rounds.count


def kills_at_agreements(folder: Path) -> int:
    """SIGKILL of each rank before it hands in, and when it has been told."""
    rounds = Rounds(folder / "checkpoints")
    for rank in range(RANKS):
        for topic in ("open", "written", "commit/0"):
            for when in ("before", "after"):
                death = (rank, when, topic)
                new = rounds.old + 1
                rounds.see(str(death), rank, lambda: dying(rounds.folder, new, death))  # noqa: B023
    return rounds.count


def broken_disks(folder: Path) -> int:
    """A disk of one rank that is full or broken from one call on."""
    rounds = Rounds(folder / "checkpoints")
    for rank, number, first in ((0, errno.ENOSPC, 2), (1, errno.ENOSPC, 3), (1, errno.EIO, 5)):
        # the last fsync of the parent folder fails when the checkpoint is there
        for at in range(first, rounds.calls_of(rank), 5):
            name = f"{errno.errorcode[number]} at {at}"
            rounds.fault(name, rank, lambda _, at=at, n=number: failing(at, n, for_good=True))
    return rounds.count


# --- scenes, each of which returns how many rounds it had


def deaths(folder: Path) -> int:
    """Rank 0 dies before its commit, and rank 1 when it finishes that: rank 2 does. With few that
    hear what the others have written, a rank that has not says that it does not know when all that
    have are dead; without deaths it saves like the others."""
    where = folder / "c"
    saved(where, 1)
    ended = dying(where, 2, (0, "after", "/written"), (1, "after", "/commit/0"))
    assert ended == [SIGKILLED, SIGKILLED, COMMITTED]
    assert look(where, 2) == 2
    assert len(list(where.iterdir())) == 2
    save_module.COMMITTERS = 1
    saved(where, 3)
    assert dying(where, 4, (0, "after", "/written")) == [SIGKILLED, NOT_KNOWN, NOT_KNOWN]
    assert look(where, 3) == 3
    return 2


def told_why(folder: Path) -> int:
    """What ends the save of one rank ends it for all, with the same words and no trace: one that is
    cancelled while it writes, that does not come (and is told when it does), that holds other
    tensors, and that has what cannot be saved. Also those ranks hear of it that would not hear what
    the others have written."""
    save_module.COMMITTERS = 1

    def save_of(peers: PipePeers, state: State | None = None, **options: Any) -> None:
        where = folder / options.pop("where") / "c"
        store = CheckpointStore(where, peers=peers, patience_s=options.pop("patience_s", 60))
        state = state or joint_state(1, peers.rank)
        write(store, state, step=1, kind="manual", **options)

    def cancelled(peers: PipePeers) -> None:
        cancel = threading.Event()
        if peers.rank == 1:
            cancel.set()
        save_of(peers, where="cancelled", cancel=cancel)

    def late(peers: PipePeers, **how: Any) -> None:
        if peers.rank == 2:  # comes when the first has given up
            peers.agree("wait", None, timeout_s=60)
        how = how or {"where": "late", "patience_s": 0.3 if peers.rank == 0 else 60}
        try:
            save_of(peers, **how)
        finally:
            if peers.rank != 2:
                peers.agree("wait", None, timeout_s=60)

    def called_off(peers: PipePeers) -> None:
        cancel = threading.Event()
        if peers.rank == 0:
            cancel.set()
        late(peers, where="called_off", cancel=cancel)

    def other(peers: PipePeers) -> None:
        model = {"w": torch.zeros(4 + (peers.rank == 2))}
        save_of(peers, State({"model": model}, {}), where="other")

    def odd(peers: PipePeers) -> None:
        save_of(peers, State({}, {"odd": object() if peers.rank == 1 else 1}), where="odd")

    for save_it, wanted in (
        (cancelled, "SaveAbandoned: .*rank 1"),
        (late, "SaveFailed: .*rank 0 is no longer waiting"),
        (called_off, "SaveAbandoned: .*\nSaveFailed: .*rank 0 is no longer waiting"),
        (other, "SaveFailed: .*rank 0 holds 1 tensors, .*, rank 2 1 tensors"),
        (odd, "UnsavableState: .*rank 1: "),
    ):
        assert re.search(wanted, refused(folder / save_it.__name__, save_it)), wanted
    return 5


def superseded(folder: Path) -> int:
    """A newer attempt claims at any I/O call of a rank that saves alone, and at every third one of
    two of several: what is committed is there when it looks, or never, and no rank says anything
    else."""
    rounds = 0
    for ranks, victim, stride in ((1, 0, 1), (RANKS, 0, 3), (RANKS, 1, 3)):
        at, seen = 1 + victim, True
        while seen:
            seen = _superseded_at(folder / f"{ranks}-{victim}-{at}", ranks, victim, at)
            at += stride
            rounds += seen
    return rounds


def _superseded_at(folder: Path, ranks: int, victim: int, at: int) -> bool:
    """False when the rank makes no such call."""
    folder.mkdir()
    claim = Fence(folder / "claim.json").claim()
    looked = folder / "looked"

    def take_over(n: int, _: str) -> None:
        if n != at:
            return
        fence = Fence(folder / "claim.json")
        fence.claim()
        # what a rank revokes itself would pass for its own save; a newer attempt is another process
        folders.revoked = revoked_from_anybody
        new = CheckpointStore(folder / "c", fence=fence)
        new.revoke_others()
        looked.write_text(str(len(new.committed())))

    def work(peers: PipePeers) -> int:
        fence = Fence(folder / "claim.json")
        fence.hold(claim)
        disk = CountingStorage(take_over if peers.rank == victim else None)
        others = peers if ranks > 1 else None
        store = CheckpointStore(folder / "c", storage=disk, peers=others, fence=fence)
        try:
            write(store, joint_state(1, peers.rank), step=1, kind="periodic")
        except StaleAttempt as error:
            return STALE if "the save of step 1" in str(error) else 1
        return COMMITTED

    ended = together(ranks, work)
    if not looked.exists():
        assert ended == [COMMITTED] * ranks, ended
        return False
    there = CheckpointStore(folder / "c").committed()
    assert str(len(there)) == looked.read_text(), f"call {at} of rank {victim}: {ended}"
    assert ended == [COMMITTED if there else STALE] * ranks, f"call {at} of rank {victim}: {ended}"
    left = [one.name for one in (folder / "c").glob("*") if not one.name.startswith("step-")]
    assert not left or ranks > 1, f"at call {at}: {left}"
    return True


def leftovers(folder: Path) -> int:
    """What a dead joint save has left is removed, but not while others may be finishing it."""
    where = folder / "c"
    all_of_them = [(rank, "before", "written") for rank in range(RANKS)]
    assert dying(where, 1, *all_of_them) == [SIGKILLED] * RANKS
    (left,) = where.iterdir()
    CheckpointStore(where).prune(Retention(keep=1))
    assert left.exists()
    long_ago = time.time() - 1200
    for path in (*left.iterdir(), left):
        os.utime(path, (long_ago, long_ago))
    CheckpointStore(where).prune(Retention(keep=1))
    assert not left.exists()
    return 1


def choosing(folder: Path) -> int:
    """All ranks choose the same, the newest good one; a damaged byte is found by whoever looks at
    it, and costs one warning."""
    where = folder / "c"
    saved(where, 1, 2, 3)
    assert _chosen(where) == ([3] * RANKS, 0)
    damaged = where / "step-000000003" / "part-00001.safetensors"
    good = damaged.read_bytes()
    damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert _chosen(where) == ([2] * RANKS, 1)
    damaged.write_bytes(good)
    for step in (1, 2, 3):
        (where / f"step-{step:09d}" / "shared.json").unlink()
    assert _chosen(where) == ([-1] * RANKS, 0)
    assert _chosen(folder / "none") == ([0] * RANKS, 0)
    return 1


def _chosen(where: Path) -> tuple[list[int], int]:
    """The steps that the ranks choose (0: nothing, -1: none is good), and the warnings of all."""

    def work(peers: PipePeers) -> int:
        store = CheckpointStore(where, peers=peers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = newest_good(store, topic="resume")
                step = 0 if found is None else found.step
                if found is not None:
                    store.load(found)
            except CheckpointCorrupt:
                step = 9
        return step + 10 * len([one for one in caught if one.category is RuntimeWarning])

    ended = together(RANKS, work)
    steps = [-1 if code % 10 == 9 else code % 10 for code in ended]
    assert all(code < 10 for code in ended[1:]), "only rank 0 warns"
    return steps, ended[0] // 10


def _saving(folder: Path, peers: PipePeers, disk: Any = None, **options: Any) -> Saving:
    def state(step: int) -> State:
        return joint_state(step, peers.rank)

    return Saving(folder / "c", disk, peers=peers, state=state, **options)


def savers(folder: Path) -> int:
    """Savers of several ranks skip, wait and choose alike, whatever only one of them sees."""

    def work(peers: PipePeers) -> None:
        disk = HeldDisk(1) if peers.rank == 1 else HeldDisk()
        on = _saving(folder, peers, disk)
        on.saver.reserve(on.state(1))
        on.start(1)
        on.start(2)
        on.reason(2, EventKind.SAVE_SKIPPED)
        peers.agree("let go", None)
        disk.let_go.set()
        assert on.saver.save(on.state(3), step=3).is_committed
        disk.hold(4)
        if peers.rank == 2:  # it alone expects to need more time than there is for both
            on.saver._pace.add(390.0, state_bytes=10**9)
        on.start(4)
        saved = on.stop(5)
        assert saved.is_committed, saved.reason
        assert "that one is given up" in saved.reason
        # only one rank has hardly any time: it may not even wait for the others
        on.stop(7, left_s=1e-3 if peers.rank == 2 else 600.0)
        on.saver.wait(timeout_s=600)
        why = on.reason(7, EventKind.SAVE_STARTED, EventKind.SAVE_FAILED)
        (folder / f"choice-{peers.rank}").write_text(why)
        disk.let_go.set()
        assert on.saver.wait(timeout_s=600)
        final = on.stop(8, state=on.state(9))
        assert final.is_committed, final.reason
        assert final.checkpoint is not None
        assert final.checkpoint.step == 8
        again = on.stop(8, state=on.state(9), unchanged=True)
        assert again.reason.endswith("step 8 is committed already")
        changed = on.stop(8).checkpoint
        assert changed is not None
        assert changed.path.name == "step-000000008.2"
        newest = newest_good(on.store)
        assert newest is not None
        assert newest.path == changed.path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            on.saver.close()

    assert together(RANKS, work) == [0] * RANKS
    assert len({(folder / f"choice-{rank}").read_text() for rank in range(RANKS)}) == 1
    assert look(folder / "c", 8) == 8
    return 1


def savers_apart(folder: Path) -> int:
    """A rank that comes late to a save, is busy with the last one, or cannot take part holds up no
    other, and all save the same step or none."""

    def work(peers: PipePeers) -> None:
        on = _saving(folder, peers)
        if peers.rank == 1:
            peers.agree("the others train on", None)
        on.start(1)
        if peers.rank != 1:
            peers.agree("the others train on", None)
        on.saver.wait()
        assert on.saver.durable_step == 1
        skipped = threading.Event()

        def stay_busy(when: str, topic: str) -> None:
            if (peers.rank, when) == (1, "after") and "commit" in topic:
                assert skipped.wait(60)

        peers.hook = stay_busy
        on.start(2)
        if peers.rank != 1:
            on.saver.wait()
        on.start(3)
        why = on.reason(3, EventKind.SAVE_SKIPPED)
        assert why == "the save of step 2 is still under way (on rank 1)"
        skipped.set()
        on.saver.wait()
        assert on.saver.durable_step == 2
        on.saver.start(State({"odd": object() if peers.rank == 1 else 1}, {}), step=4)
        on.saver.wait()
        with pytest.raises(UnsavableState, match=r"rank 1: shared\.odd"):
            on.saver.poll()
        on.start(5)
        on.saver.close()

    assert together(RANKS, work) == [0] * RANKS
    assert look(folder / "c", 5) == 5
    return 1


def savers_without_memory(folder: Path) -> int:
    """A rank without memory for a copy writes its state itself, beside others that copy theirs:
    what is committed is what all had when the save began. When a rank is gone, the savers of the
    others say so and nobody waits for it."""

    def work(peers: PipePeers) -> None:
        has_none = peers.rank == 1
        room = Room(0 if has_none else 10**9, 10**9, 0, "the limit of a test")
        on = _saving(folder, peers, room=lambda: room)
        assert bool(on.saver.reserve(on.state(1))) == has_none
        on.start(1)
        assert on.saver.durable_step == 1 or not has_none
        on.saver.wait()
        saved = on.stop(2)
        assert saved.is_committed, saved.reason
        if peers.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        on.start(3)
        on.saver.wait()
        with pytest.warns(RuntimeWarning, match="rank 1 is gone"):
            on.saver.poll()
        with pytest.raises(SaveFailed, match="rank 1 is gone"):
            on.saver.save(on.state(4), step=4)
        saved = on.stop(5)
        assert "rank 1 is gone" in saved.reason
        assert not saved.is_committed
        assert saved.checkpoint is not None
        assert saved.checkpoint.step == 2
        on.saver.close()

    assert together(RANKS, work) == [0, SIGKILLED, 0]
    assert look(folder / "c", 2) == 2
    return 1


def main() -> None:
    warnings.simplefilter("error")
    if sys.version_info >= (3, 12):
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
    folder, scene = Path(sys.argv[1]), sys.argv[2]
    print("done", globals()[scene](folder))


if __name__ == "__main__":
    main()
