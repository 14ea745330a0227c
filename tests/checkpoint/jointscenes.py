"""Scenes of jointly.py: real ranks that save together, choose together, or cannot. Each returns how
many rounds it had."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.disks import HeldDisk
from checkpoint.faulty import CountingStorage
from checkpoint.jointstates import (
    ABANDONED,
    COMMITTED,
    NOT_KNOWN,
    NOT_SAVED,
    RANKS,
    SIGKILLED,
    joint_state,
    look,
    save,
)
from checkpoint.pipepeers import PipePeers, together
from checkpoint.states import revoked_from_anybody, write

from hydroslurm.checkpoint import folders
from hydroslurm.checkpoint import save as save_module
from hydroslurm.checkpoint.newest import newest_good
from hydroslurm.checkpoint.outcome import SaveEvent
from hydroslurm.checkpoint.saver import Saver
from hydroslurm.checkpoint.store import CheckpointStore, Retention, State
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


def two_deaths(folder: Path) -> int:
    """Rank 0 dies before its commit, and rank 1 when it finishes that: rank 2 does."""
    first = together(RANKS, lambda p: save(folder / "c", p, 1, CountingStorage(), "first"))
    assert first == [COMMITTED] * RANKS

    def work(peers: PipePeers) -> int:
        def hook(when: str, topic: str) -> None:
            if (peers.rank, when, topic) in (
                (0, "after", "save/written"),
                (1, "after", "save/commit/0"),
            ):
                os.kill(os.getpid(), signal.SIGKILL)

        peers.hook = hook
        return save(folder / "c", peers, 2, CountingStorage(), "save")

    assert together(RANKS, work) == [SIGKILLED, SIGKILLED, COMMITTED]
    assert look(folder / "c", (2,)) == 2
    assert len(list((folder / "c").iterdir())) == 2
    return 1


def few_committers(folder: Path) -> int:
    """A rank that has not heard what the others have written saves like the others, and says that
    it does not know when all that have heard it are dead."""
    save_module.COMMITTERS = 1
    for step in (1, 2):
        ended = together(RANKS, lambda p: save(folder / "c", p, step, CountingStorage(), "s"))  # noqa: B023
        assert ended == [COMMITTED] * RANKS
    assert look(folder / "c", (2,)) == 2

    def work(peers: PipePeers) -> int:
        def hook(when: str, topic: str) -> None:
            if (peers.rank, when, topic) == (0, "after", "save/written"):
                os.kill(os.getpid(), signal.SIGKILL)

        peers.hook = hook
        return save(folder / "c", peers, 3, CountingStorage(), "save")

    assert together(RANKS, work) == [SIGKILLED, NOT_KNOWN, NOT_KNOWN]
    assert look(folder / "c", (2,)) == 2
    return 1


def given_up(folder: Path) -> int:
    """One rank that is cancelled while it writes ends the save for all, with the same words."""

    def work(peers: PipePeers) -> int:
        cancel = threading.Event()
        if peers.rank == 1:
            cancel.set()
        store = CheckpointStore(folder / "c", peers=peers, patience_s=60)
        try:
            write(store, joint_state(1, peers.rank), step=1, kind="stop", cancel=cancel)
        except SaveAbandoned as error:
            (folder / f"words-{peers.rank}").write_text(str(error))
            return ABANDONED
        except SaveFailed as error:
            (folder / f"words-{peers.rank}").write_text(str(error))
            return NOT_SAVED
        return COMMITTED

    ended = together(RANKS, work)
    assert set(ended) <= {ABANDONED, NOT_SAVED}, ended
    words = {(folder / f"words-{rank}").read_text() for rank in range(RANKS)}
    assert len(words) == 1, words
    assert "rank 1" in words.pop()
    assert not any((folder / "c").iterdir())
    return 1


STALE = 6


def superseded(folder: Path) -> int:
    """A newer attempt claims at any I/O call of rank 0 or 1: what is committed is there when it
    looks, or never, and no rank says anything else."""
    rounds = 0
    for victim in (0, 1):
        at, seen = 0, True
        while seen:
            at += 2
            seen = _superseded_at(folder / f"{victim}-{at}", victim, at)
            rounds += seen
    return rounds


def _superseded_at(folder: Path, victim: int, at: int) -> bool:
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
        store = CheckpointStore(folder / "c", storage=disk, peers=peers, fence=fence)
        try:
            write(store, joint_state(1, peers.rank), step=1, kind="periodic")
        except StaleAttempt:
            return STALE
        return COMMITTED

    ended = together(RANKS, work)
    if not looked.exists():
        assert ended == [COMMITTED] * RANKS, ended
        return False
    there = CheckpointStore(folder / "c").committed()
    assert str(len(there)) == looked.read_text(), f"call {at} of rank {victim}: {ended}"
    assert ended == [COMMITTED if there else STALE] * RANKS, f"call {at} of rank {victim}: {ended}"
    return True


def leftovers(folder: Path) -> int:
    """What a dead joint save has left is removed, but not while others may be finishing it."""
    where = folder / "c"

    def work(peers: PipePeers) -> int:
        def hook(_when: str, topic: str) -> None:
            if "written" in topic:
                os.kill(os.getpid(), signal.SIGKILL)

        peers.hook = hook
        return save(where, peers, 1, CountingStorage(), "save")

    assert together(RANKS, work) == [SIGKILLED] * RANKS
    (left,) = where.iterdir()
    CheckpointStore(where).prune(Retention(keep=1))
    assert left.exists()
    long_ago = time.time() - 1200
    for path in (*left.iterdir(), left):
        os.utime(path, (long_ago, long_ago))
    CheckpointStore(where).prune(Retention(keep=1))
    assert not left.exists()
    return 1


def patience(folder: Path) -> int:
    """A rank that does not come makes the others fail, which name it; it is told the same."""
    words: dict[str, Any] = {}

    def work(peers: PipePeers) -> int:
        patience_s = 0.3 if peers.rank == 0 else 60
        store = CheckpointStore(folder / "c", peers=peers, patience_s=patience_s)
        state = joint_state(1, peers.rank)
        if peers.rank == 2:
            # comes when the first has given up
            try:
                peers.agree("wait", None, timeout_s=60)
            except Exception:
                return 1
        try:
            write(store, state, step=1, kind="manual")
        except SaveFailed as error:
            words[str(peers.rank)] = str(error)
            (folder / f"words-{peers.rank}").write_text(str(error))
            if peers.rank != 2:
                peers.agree("wait", None, timeout_s=60)
            return NOT_SAVED
        return COMMITTED

    assert together(RANKS, work) == [NOT_SAVED] * RANKS
    found = {(folder / f"words-{rank}").read_text() for rank in range(RANKS)}
    assert len(found) == 1, found
    assert "rank 0 is no longer waiting" in found.pop()
    return 1


def unlike(folder: Path) -> int:
    """Ranks that hold other tensors, and one with what cannot be saved: all are told."""

    def work(peers: PipePeers) -> int:
        store = CheckpointStore(folder / "c", peers=peers)
        shared = {"model": {"w": torch.zeros(4 + (peers.rank == 2))}}
        for topic, state, wanted in (
            ("a", State(shared, {}), "rank 0 holds 1 tensors, .*, rank 2 1 tensors"),
            ("b", State({}, {"odd": object() if peers.rank == 1 else 1}), "rank 1: "),
        ):
            with pytest.raises(CheckpointError, match=wanted):
                write(store, state, step=1, kind="manual", topic=topic)
        return 0

    assert together(RANKS, work) == [0] * RANKS
    assert not any((folder / "c").iterdir())
    return 1


def choosing(folder: Path) -> int:
    """All ranks choose the same; a damaged file is found by whoever looks at it."""
    where, rounds_done = folder / "c", 0
    for step in (1, 2, 3):
        ended = together(RANKS, lambda p: save(where, p, step, CountingStorage(), "s"))  # noqa: B023
        assert ended == [COMMITTED] * RANKS
    assert _chosen(where) == ([3] * RANKS, 0)
    names = sorted(path.name for path in (where / "step-000000003").iterdir())
    for name in names:
        damaged = where / "step-000000003" / name
        good = damaged.read_bytes()
        damaged.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        assert _chosen(where) == ([2] * RANKS, 1), name
        damaged.write_bytes(good)
        rounds_done += 1
    for step in (1, 2, 3):
        (where / f"step-{step:09d}" / "shared.json").unlink()
    assert _chosen(where) == ([-1] * RANKS, 0)
    assert _chosen(folder / "none") == ([0] * RANKS, 0)
    return rounds_done


def _chosen(where: Path) -> tuple[list[int], int]:
    """The steps that the ranks choose (0: nothing, -1: none is good), and the warnings of all."""

    def work(peers: PipePeers) -> int:
        store = CheckpointStore(where, peers=peers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = newest_good(store, topic="resume")
                step = 0 if found is None else found.checkpoint.step
                if found is not None:
                    store.load(found.checkpoint)
            except CheckpointCorrupt:
                step = 9
        return step + 10 * len([one for one in caught if one.category is RuntimeWarning])

    ended = together(RANKS, work)
    steps = [-1 if code % 10 == 9 else code % 10 for code in ended]
    assert all(code < 10 for code in ended[1:]), "only rank 0 warns"
    return steps, ended[0] // 10


def savers(folder: Path) -> int:
    """Savers of several ranks skip, wait and choose alike, whatever only one of them sees."""

    def work(peers: PipePeers) -> int:
        disk = HeldDisk(1) if peers.rank == 1 else HeldDisk()
        store = CheckpointStore(folder / "c", storage=disk, peers=peers, patience_s=60)
        events: queue.SimpleQueue[SaveEvent] = queue.SimpleQueue()
        saver = Saver(store, tell=events.put)
        saver.reserve(joint_state(1, peers.rank))
        saver.start(joint_state(1, peers.rank), step=1)
        saver.start(joint_state(2, peers.rank), step=2)
        _until(events, "save_skipped", step=2)
        peers.agree("let go", None)
        disk.let_go.set()
        assert saver.save(joint_state(3, peers.rank), step=3).is_committed
        # only one rank knows that there is hardly any time
        left_s = 1e-3 if peers.rank == 2 else 600.0
        deadline_s = time.monotonic() + 600
        disk.hold(4)
        saver.start(joint_state(4, peers.rank), step=4)
        saved = saver.save_by(
            lambda: joint_state(5, peers.rank), step=5, deadline_mono_s=time.monotonic() + left_s
        )
        # the one without time may not even wait for the others
        chosen = _until(events, "save_started", "save_failed", step=5).reason
        assert chosen in saved.reason
        (folder / f"choice-{peers.rank}").write_text(chosen)
        saver.give_up()
        disk.let_go.set()
        assert saver.wait(timeout_s=max(0.0, deadline_s - time.monotonic()))
        final = saver.save_by(joint_state(7, peers.rank), step=6, deadline_mono_s=deadline_s)
        assert final.is_committed, final.reason
        assert final.checkpoint is not None
        assert final.checkpoint.step == 6
        again = saver.save_by(
            joint_state(7, peers.rank), step=6, deadline_mono_s=deadline_s, unchanged=True
        )
        assert again.reason.endswith("step 6 is committed already")
        changed = saver.save_by(joint_state(6, peers.rank), step=6, deadline_mono_s=deadline_s)
        assert changed.checkpoint is not None
        assert changed.checkpoint.path.name == "step-000000006.2"
        newest = newest_good(store)
        assert newest is not None
        assert newest.checkpoint.path == changed.checkpoint.path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saver.close()
        return 0

    assert together(RANKS, work) == [0] * RANKS
    assert len({(folder / f"choice-{rank}").read_text() for rank in range(RANKS)}) == 1
    assert look(folder / "c", (6,)) == 6
    return 1


def savers_apart(folder: Path) -> int:
    """A rank that comes late to a save, is busy with the last one, or cannot take part holds up no
    other, and all save the same step or none."""

    def work(peers: PipePeers) -> int:
        store = CheckpointStore(folder / "c", peers=peers, patience_s=60)
        events: queue.SimpleQueue[SaveEvent] = queue.SimpleQueue()
        saver = Saver(store, tell=events.put)
        if peers.rank == 1:
            peers.agree("the others train on", None)
        saver.start(joint_state(1, peers.rank), step=1)
        if peers.rank != 1:
            peers.agree("the others train on", None)
        saver.wait()
        assert saver.durable_step == 1
        skipped = threading.Event()

        def stay_busy(when: str, topic: str) -> None:
            if (peers.rank, when) == (1, "after") and "commit" in topic:
                assert skipped.wait(60)

        peers.hook = stay_busy
        saver.start(joint_state(2, peers.rank), step=2)
        if peers.rank != 1:
            saver.wait()
        saver.start(joint_state(3, peers.rank), step=3)
        why = _until(events, "save_skipped", step=3).reason
        assert why == "the save of step 2 is still under way (on rank 1)"
        skipped.set()
        saver.wait()
        assert saver.durable_step == 2
        odd = State({"odd": object() if peers.rank == 1 else 1}, {})
        saver.start(odd, step=4)
        saver.wait()
        with pytest.raises(UnsavableState, match=r"rank 1: shared\.odd"):
            saver.poll()
        saver.start(joint_state(5, peers.rank), step=5)
        saver.close()
        assert saver.durable_step == 5
        return 0

    assert together(RANKS, work) == [0] * RANKS
    assert look(folder / "c", (5,)) == 5
    return 1


def _until(events: queue.SimpleQueue[SaveEvent], *kinds: str, step: int) -> SaveEvent:
    """The next event of this step that is one of these."""
    while True:
        event = events.get(timeout=60)
        if event.kind.value in kinds and event.step == step:
            return event


def savers_without_memory(folder: Path) -> int:
    """A rank without memory for a copy writes its state itself, beside others that copy theirs:
    what is committed is what all had when the save began."""

    def work(peers: PipePeers) -> int:
        store = CheckpointStore(folder / "c", peers=peers, patience_s=60)
        room = Room(0 if peers.rank == 1 else 10**9, 10**9, 0, "the limit of a test")
        saver = Saver(store, room=lambda: room)
        assert bool(saver.reserve(joint_state(1, peers.rank))) == (peers.rank == 1)
        saver.start(joint_state(1, peers.rank), step=1)
        assert saver.durable_step == 1 or peers.rank != 1
        saver.wait()
        far_s = time.monotonic() + 600
        saved = saver.save_by(joint_state(2, peers.rank), step=2, deadline_mono_s=far_s)
        assert saved.is_committed, saved.reason
        saver.close()
        return 0

    assert together(RANKS, work) == [0] * RANKS
    assert look(folder / "c", (2,)) == 2
    return 1


def savers_without_one(folder: Path) -> int:
    """When a rank is gone, the savers of the others say so and nobody waits for it."""

    def work(peers: PipePeers) -> int:
        store = CheckpointStore(folder / "c", peers=peers, patience_s=60)
        saver = Saver(store)
        saver.save(joint_state(1, peers.rank), step=1)
        if peers.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        saver.start(joint_state(2, peers.rank), step=2)
        saver.wait()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            saver.poll()
        assert "rank 1 is gone" in str(caught[0].message)
        with pytest.raises(SaveFailed, match="rank 1 is gone"):
            saver.save(joint_state(3, peers.rank), step=3)
        saved = saver.save_by(
            joint_state(4, peers.rank), step=4, deadline_mono_s=time.monotonic() + 60
        )
        assert "rank 1 is gone" in saved.reason
        assert not saved.is_committed
        assert saved.checkpoint is not None
        assert saved.checkpoint.step == 1
        saver.close()
        return 0

    assert together(RANKS, work) == [0, SIGKILLED, 0]
    assert look(folder / "c", (1,)) == 1
    return 1
