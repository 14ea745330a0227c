"""The parts of an agent that need no process: which status a node has, where nodes meet, and which
worker hangs or keeps the others waiting."""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import threading
import time
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from hydroslurm.core.registry import Entry
from hydroslurm.core.status import Moment, RankStatus
from hydroslurm.elastic.roster import Awaited, Timing
from hydroslurm.jobs.agent import rendezvous
from hydroslurm.jobs.agent.node import Departed, SignalPipe
from hydroslurm.jobs.agent.progress import Progress, Use, Watch
from hydroslurm.jobs.agent.rendezvous import (
    Peers,
    Rendezvous,
    fill_in,
    find_rendezvous,
)
from hydroslurm.jobs.agent.workers import (
    Worker,
    are_leaving,
    failure_status,
    family,
    node_status,
    what_is_missing,
)

TERM = -int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("codes", "stop_asked", "others_leave", "waited_for"),
    [
        ((None, None), True, True, False),
        ((75, None), False, True, True),
        ((75, None), False, False, False),
        ((75, None), True, False, True),
        ((1, None), True, False, True),
        ((1, None), False, True, False),
        ((TERM, None), False, True, False),
        ((TERM, None), True, True, True),
        ((1, 0), True, True, False),
        ((75, 1), False, True, False),
    ],
)
def test_who_is_waited_for(
    codes: tuple[int | None, ...], stop_asked: bool, others_leave: bool, waited_for: bool
) -> None:
    """Who leaves on purpose is waited for, who fails is not, and after a stop nobody is ended."""
    assert are_leaving(codes, stop_asked=stop_asked, others_leave=others_leave) is waited_for


@pytest.mark.parametrize(
    ("codes", "stop_asked", "node", "failure"),
    [
        ((75, 75), True, 75, None),
        ((143, 93, 75), False, 93, None),
        ((TERM, TERM), True, 143, None),
        ((TERM,), False, None, 143),
        ((TERM, 1), True, None, 1),
        ((1, -9), True, None, 137),
        ((138, 1), False, None, 138),
        ((75, 4), False, 75, 4),
    ],
)
def test_node_status(
    codes: tuple[int, ...], stop_asked: bool, node: int | None, failure: int | None
) -> None:
    """One status of many: what binds most, else what torchrun makes of it; of workers that failed
    together the one that says most."""
    assert node_status(codes, stop_asked=stop_asked) == node
    assert failure_status(codes, stop_asked=stop_asked) == failure


def test_a_child_of_any_thread_is_of_the_family() -> None:
    """Not only those that the main thread has started."""
    started: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()

    def run() -> None:
        child = subprocess.Popen(["sleep", "60"])
        started.put(child)
        child.wait()

    thread = threading.Thread(target=run)
    thread.start()
    child = started.get()
    assert child.pid in list(family(os.getpid()))
    child.kill()
    thread.join()


def test_a_module_is_not_looked_for() -> None:
    """That would import its parents."""
    assert what_is_missing("no.such", is_program=False, is_module=True) is None
    assert what_is_missing("no.such", is_program=False, is_module=False) is not None


def _step(**values: str) -> dict[str, str]:
    step = {"JOB_ID": "12", "STEP_ID": "0", "PROCID": "1", "NODEID": "1"}
    step |= {"STEP_NUM_TASKS": "3", "STEP_NODELIST": "n[1-3]"}
    return {**{f"SLURM_{name}": value for name, value in step.items()}, **values}


def test_where_the_tasks_of_a_job_step_meet() -> None:
    """One agent per task, at the first node, elsewhere in each attempt; one alone needs nothing."""
    where = find_rendezvous(_step(), key=None)
    assert where is not None
    assert (where.nnodes, where.run_id, where.rank) == (3, "12.0.0", 1)
    assert where.endpoint.startswith("n1:")
    first = find_rendezvous(_step(SLURM_PROCID="0", SLURM_NODEID="0"), key=None)
    again = find_rendezvous(_step(SLURM_RESTART_COUNT="1"), key=None)
    assert first is not None
    assert again is not None
    assert (first.endpoint, first.rank) == (where.endpoint, 0)
    assert (again.endpoint != where.endpoint, again.run_id) == (True, "12.0.1")
    assert find_rendezvous(_step(SLURM_PROCID="0", SLURM_STEP_NUM_TASKS="1"), key=None) is None
    assert find_rendezvous({}, key=None) is None


def _filled(rank: int = 1, **given: object) -> dict[str, object]:
    """What becomes of torchrun's arguments, in which these words were given; {}: nothing."""
    said = {"nnodes": "1:1", "rdzv_backend": "static", "rdzv_endpoint": "", "rdzv_conf": ""}
    said |= {"rdzv_id": "none", "standalone": False}
    chosen = argparse.Namespace(**{**said, **given})
    untouched = argparse.Namespace(**said)
    is_filled = fill_in(chosen, Rendezvous(3, "n1:2", "12.0.0", rank), untouched=untouched)
    assert is_filled or vars(chosen) == {**said, **given}
    return vars(chosen) if is_filled else {}


@pytest.mark.parametrize(
    "given",
    [{"nnodes": "2"}, {"standalone": True}, {"rdzv_endpoint": "h:1"}, {"rdzv_backend": "etcd-v2"}],
)
def test_what_was_said_stays(given: dict[str, object]) -> None:
    """One word of the user's about the rendezvous, and none of it is changed."""
    assert _filled(**given) == {}


@pytest.mark.parametrize("given", [{}, {"nnodes": "1:3", "rdzv_backend": "c10d"}, {"nnodes": "3"}])
def test_what_was_not_said_is_filled_in(given: dict[str, object]) -> None:
    """The tasks meet in torch's c10d store, which the first of them has. How many nodes there may
    be is the user's."""
    found = {
        "nnodes": "3", "rdzv_backend": "c10d", "rdzv_endpoint": "n1:2", "rdzv_id": "12.0.0",
        "rdzv_conf": "join_timeout=9,is_host=0", "standalone": False,
    }  # fmt: skip
    assert _filled(rdzv_conf="join_timeout=9", **given) == {**found, **given}
    assert _filled(rank=0, **given)["rdzv_conf"] == "is_host=1"


def test_signals_are_told_in_their_order() -> None:
    """To another thread, and end nothing; the handlers of before come back."""
    before = signal.getsignal(signal.SIGUSR1)
    box = SignalPipe([signal.SIGUSR1, signal.SIGUSR2], stops=[signal.SIGUSR2])
    box.open()
    try:
        for signo in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2):
            os.kill(os.getpid(), signo)
        assert box.wait(10.0) == [signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2]
        assert box.wait(0.0) == []
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        box.open()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert box.wait(10.0) == [signal.SIGUSR1]
        with box.interruptible():
            os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(Departed), box.interruptible():
            signal.raise_signal(signal.SIGUSR2)
    finally:
        box.close()
    assert box.wait(10.0) is not None  # what had come before
    assert box.wait(10.0) is None
    assert signal.getsignal(signal.SIGUSR1) is before


class _Holder:
    """What patience needs of torch's state holder."""

    def __init__(self) -> None:
        self.sanitized = self.synced = 0

    def _sanitize(self) -> None:
        self.sanitized += 1

    def sync(self) -> bool | None:
        self.synced += 1
        self._sanitize()
        return True


def _handler(holder: object) -> SimpleNamespace:
    settings = SimpleNamespace(keep_alive_interval=timedelta(seconds=1))
    return SimpleNamespace(settings=settings, _state_holder=holder, num_nodes_waiting=lambda: 2)


def test_silence_after_a_gap_is_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes are given up as ever, but not in the time after this process was stopped, and the
    store is not asked between SIGTSTP and SIGCONT."""
    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s)
    holder = _Holder()
    said: list[str] = []
    Peers(_handler(object()), leaving=lambda: False, warn=said.append)
    assert len(said) == 1  # a torch that looks different works as before
    taught = Peers(_handler(holder), leaving=lambda: False, warn=pytest.fail)
    holder.sync()
    now_s += 1.5
    holder.sync()
    assert (holder.synced, holder.sanitized) == (2, 2)
    taught.suspend(True)
    assert holder.sync() is None
    now_s += 600
    taught.suspend(False)
    holder.sync()
    now_s += 1.0
    holder.sync()
    assert (holder.synced, holder.sanitized) == (4, 2)
    for _ in range(31):
        now_s += 1.0
        holder.sync()
    assert holder.sanitized > 2


def test_a_lost_store_is_borne_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent with the store may leave a moment before ours hears of it; a node that leaves asks
    nobody."""
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    def lost() -> int:
        raise RendezvousConnectionError("gone")

    now_s = time.monotonic()
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now_s)
    leaving = False
    handler = _handler(None)
    taught = Peers(handler, leaving=lambda: leaving, warn=pytest.fail)
    assert taught.num_nodes_waiting() == 2
    handler = _handler(None)
    handler.num_nodes_waiting = lost
    taught = Peers(handler, leaving=lambda: leaving, warn=pytest.fail)
    assert handler.num_nodes_waiting() == 0
    now_s += 3600  # it was suspended, as the other one was
    for _ in range(6):
        assert handler.num_nodes_waiting() == 0
        now_s += 5
    with pytest.raises(RendezvousConnectionError):
        taught.num_nodes_waiting()
    leaving = True
    assert taught.num_nodes_waiting() == 0


WORKERS = (Worker(0, 100), Worker(1, 101))
TIMEOUT_S = 600.0
HEARTBEAT_S = 10.0
MEETS = Awaited(meeting_s=600.0)
ENDED = Awaited(ended=True)


class Node:
    """Two workers, second after second, by what they tell and use."""

    def __init__(self, collectives: int | None = 7) -> None:
        self.now_s = 1000.0
        self.used: dict[int, Use] = {100: (0.0, 0), 101: (0.0, 0)}
        self.states = {100: "S", 101: "S", 777: "S"}
        self.furthest = 0
        self.told: list[RankStatus | None] = [self.status(collectives), self.status(collectives)]
        self.ended: list[int] = []
        timing = Timing(silent_s=5.0, stuck_s=900.0)
        sees: Any = {"use_of": self.used.__getitem__, "state_of": self.states.__getitem__}
        self.watch = Watch(timing, **sees)

    def status(self, collectives: int | None = None, **more: Any) -> RankStatus:
        limits = {"collective_timeout_s": TIMEOUT_S, "heartbeat_s": HEARTBEAT_S}
        return RankStatus(0, "running", Moment(1, 1), collectives=collectives, **limits, **more)

    def _tell(self, by_s: float) -> list[RankStatus | None]:
        self.now_s += by_s
        now = Moment(int(self.now_s * 1e9), 1)
        return [one and replace(one, as_of=now) for one in self.told]

    def look(self, awaited: Awaited | None = None, *, by_s: float = 1.0) -> Progress:
        told, awaited = self._tell(by_s), awaited or Awaited(collectives=self.furthest)
        return self.watch.look(WORKERS, told, ended=self.ended, awaited=awaited, now_s=self.now_s)

    def hangs_after(
        self,
        awaited: Awaited | None = None,
        *,
        most_s: int = 2000,
        cpu: float = 0.0,
        moved: int = 0,
    ) -> int:
        """Seconds until a worker is said to hang, in a collective, or where another is awaited,
        while the second one uses so much a second; 0 if that does not come."""
        for second in range(most_s):
            used_s, bytes_ = self.used[101]
            self.used[101] = (used_s + cpu, bytes_ + moved)
            if self.look(awaited).hangs:
                return second
        return 0


@pytest.mark.parametrize(
    ("cpu", "moved", "after_s", "said"),
    [
        (0.0, 0, 300, "stands at train.py:7 in f, and does nothing"),
        (0.02, 300, 300, "and does nothing"),
        (0.9, 0, 520, "though it is busy"),
        (0.0, 1 << 20, 520, "though it is busy"),
        (-5.0, 0, 520, "though it is busy"),
    ],
)
def test_a_worker_that_others_wait_for(cpu: float, moved: int, after_s: float, said: str) -> None:
    """Half of the time-out for one that does nothing, nine tenths less two heartbeats for one that
    does anything: it could still come. A child of it that ends is something."""
    node = Node()
    node.told = [node.status(8), node.status(7, stands_at="train.py:7 in f")]
    assert node.hangs_after(cpu=cpu, moved=moved) == after_s
    found = node.look()
    assert found.hangs.startswith("local rank 1 (pid 101) hangs: ")
    assert said in found.hangs
    assert "in collective 8, which fails after 600 s" in found.hangs
    assert found.collectives == 7


@pytest.mark.parametrize("state", ["parking", "parked"])
def test_nobody_hangs_in_a_collective(state: str) -> None:
    """Not those that are all at the same collective, however long, unless one of another node is
    further; not one that is paused, nor one that tells nothing, nor while any of them moves."""
    node = Node()
    assert not node.hangs_after(most_s=1000)
    node.told[1] = replace(node.status(6), state=state)
    assert not node.hangs_after(most_s=1000)
    node.told[1] = node.status(None)
    assert not node.hangs_after(most_s=1000)
    assert node.look().collectives is None
    for number in range(8, 13):
        node.told = [node.status(number), node.status(number - 1)]
        assert not node.hangs_after(most_s=250)
    node, node.furthest = Node(), 8
    assert node.hangs_after(most_s=310) == 300
    assert "local rank 0 (pid 100) hangs" in node.look().hangs


def test_a_stopped_worker() -> None:
    """By a signal, not by a debugger; and only as long as the agent itself runs."""
    node = Node()
    node.states[100] = "t"
    assert not node.hangs_after(most_s=30)
    node.states[100] = "T"
    assert not node.hangs_after(most_s=4)
    node.now_s += 60  # all of the node was stopped
    assert node.hangs_after(most_s=10) == 5
    assert node.look().hangs == "local rank 0 (pid 100) has been stopped for 6 s (SIGSTOP)"


@pytest.mark.parametrize(
    ("state", "silent_s", "said"),
    [("D", 0, "waits in the kernel"), ("R", 100, "none of its threads runs Python")],
)
def test_what_is_said_of_others(state: str, silent_s: int, said: str) -> None:
    """A file system that does not answer; somebody who keeps the interpreter."""
    node = Node()
    node.told[1] = node.status(6)
    assert node.hangs_after()
    node.states[101] = state
    first, old = node._tell(1.0)
    assert old is not None
    last = replace(old, as_of=Moment(int((node.now_s - silent_s) * 1e9), 1))
    found = node.watch.look(WORKERS, [first, last], awaited=Awaited(), now_s=node.now_s)
    assert said in found.hangs


def test_pace() -> None:
    """Of the run: the furthest step, the rate that was told last, the samples of all ranks."""
    node = Node()
    node.told = [
        node.status(7, step=30, steps_per_s=4.0, samples_per_step=64),
        node.status(7, step=29, steps_per_s=3.9, samples_per_step=64),
    ]
    found = node.look()
    assert (found.step, found.step_s, found.samples_per_s) == (30, 0.25, 256.0)
    node.told = [node.status(7), node.status(7)]
    assert node.look() == Progress(collectives=7)


def test_workers_that_do_not_come() -> None:
    """Those that do nothing, after half of the time-out of the others; one that has come is not
    waited for, and its coming gives the other its time again."""
    node = Node(None)
    node.told[0] = node.status(stands_at="train.py:7 in f")
    node.told[1] = None
    assert node.hangs_after(MEETS) == 300
    first, second = node.look(MEETS).hangs.split("; ")
    assert first.startswith("local rank 0 (pid 100) hangs: it stands at train.py:7 in f, and has")
    assert "init_process_group, which fails after 600 s" in first
    assert second.startswith("local rank 1 (pid 101) hangs: it has not come to its `import torch`")
    node.told[1] = node.status(meeting_timeout_s=3000.0)
    assert node.look(MEETS).hangs == ""
    assert node.hangs_after(Awaited()) == 899
    assert "local rank 1" not in node.look(Awaited()).hangs
    assert node.look().meeting_s == 3000.0


def test_nobody_is_missed() -> None:
    """Nobody is waited for; the other one downloads or computes; all have come, or have a process
    group; somebody is paused; the agent itself was stopped."""
    for cpu, moved in ((0.1, 0), (0.0, 20 << 10)):
        for awaited in (MEETS, ENDED):
            assert not Node(None).hangs_after(awaited, cpu=cpu, moved=moved, most_s=1000)
    node = Node(None)
    for awaited in (Awaited(), Awaited(collectives=7)):
        assert not node.hangs_after(awaited, most_s=1000)
    node.told = [node.status(meeting_timeout_s=600.0), node.status(collectives=0)]
    assert not node.hangs_after(MEETS, most_s=1000)
    node.told = [node.status(), replace(node.status(), state="parked")]
    assert not node.hangs_after(MEETS, most_s=1000)
    node.told[1] = node.status()
    assert not node.hangs_after(MEETS, most_s=299)
    assert node.look(MEETS, by_s=400.0).hangs == ""


def test_looks_that_come_fast_count_as_one() -> None:
    """One hundredth of a second, which the kernel counts in, is much of a short time. The pid that
    is named is the rank's: below a shell script it is another than torchrun's."""
    node = Node(None)
    workers = (WORKERS[0], Worker(1, 101, Entry(777, 1, 0, "", {})))
    node.used[777] = (0.0, 0)
    said, number = "", 0
    while not said and number < 302 * 20:
        number += 1
        node.used[777] = (number // 400 / 100, 0)
        told = node._tell(0.05)
        said = node.watch.look(workers, told, awaited=MEETS, now_s=node.now_s).hangs
    assert 300 <= number / 20 <= 302
    assert "(pid 777)" in said


@pytest.mark.parametrize("here", [True, False])
def test_one_that_does_not_end(here: bool) -> None:
    """Once another has, of this node or elsewhere; whatever process groups it had."""
    node = Node(None)
    node.ended = [0] if here else []
    awaited = Awaited() if here else ENDED
    node.told[0] = node.status(collectives=7)
    node.told[1] = replace(node.status(collectives=7), state="ended")
    assert node.hangs_after(awaited) == 900
    said = node.look(awaited).hangs
    assert "local rank 1 (pid 101) hangs: it has ended its script, and does not exit, and" in said
    assert said.endswith("while other ranks have ended")
    assert ("local rank 0" in said) is not here
