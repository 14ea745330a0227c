"""Which worker hangs, and how fast they are, by what they tell. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hydroslurm.core.status import Moment, RankStatus
from hydroslurm.elastic.roster import Timing
from hydroslurm.jobs.agent.progress import Progress, Use, Watch
from hydroslurm.jobs.agent.workers import Worker

WORKERS = (Worker(0, 100), Worker(1, 101))
TIMEOUT_S = 600.0
HEARTBEAT_S = 10.0


class Node:
    """Two workers, second after second."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.used: dict[int, Use] = {100: (0.0, 0), 101: (0.0, 0)}
        self.states = {100: "S", 101: "S"}
        self.furthest = 0
        self.told = [self.status(7), self.status(7)]
        self.watch = Watch(
            Timing(silent_s=5.0, stuck_s=900.0),
            use_of=self.used.__getitem__,
            state_of=self.states.__getitem__,
        )

    def status(self, collectives: int | None, **more: Any) -> RankStatus:
        return RankStatus(
            0,
            "running",
            Moment(1, 1),
            collectives=collectives,
            collective_timeout_s=TIMEOUT_S,
            heartbeat_s=HEARTBEAT_S,
            **more,
        )

    def look(self) -> Progress:
        self.now_s += 1.0
        now = Moment(int(self.now_s * 1e9), 1)
        self.told = [replace(one, as_of=now) for one in self.told]
        return self.watch.look(WORKERS, self.told, furthest=self.furthest, now_s=self.now_s)

    def hangs_after(self, *, at_most_s: int = 700, cpu: float = 0.0, written: int = 0) -> float:
        """Seconds until a worker is said to hang, while the second one uses so much a second; 0 if
        that does not come."""
        for second in range(at_most_s):
            used_s, moved = self.used[101]
            self.used[101] = (used_s + cpu, moved + written)
            if self.look().hangs:
                return float(second)
        return 0.0


@pytest.mark.parametrize(
    ("cpu", "written", "after_s", "said"),
    [
        (0.0, 0, 300, "stands at train.py:7 in f, and does nothing"),
        (0.02, 300, 300, "and does nothing"),
        (0.9, 0, 520, "though it is busy"),
        (0.0, 1 << 20, 520, "though it is busy"),
        (-5.0, 0, 520, "though it is busy"),
    ],
)
def test_a_worker_that_others_wait_for(cpu: float, written: int, after_s: float, said: str) -> None:
    """Half of the time-out for one that does nothing, nine tenths less two heartbeats for one that
    does anything: it could still come. A child of it that ends is something."""
    node = Node()
    node.told = [node.status(8), node.status(7, stands_at="train.py:7 in f")]
    assert node.hangs_after(cpu=cpu, written=written) == after_s
    found = node.look()
    assert found.hangs.startswith("local rank 1 (pid 101) hangs: ")
    assert said in found.hangs
    assert "in collective 8, which fails after 600 s" in found.hangs
    assert found.collectives == 7


def test_one_of_another_node_waits() -> None:
    """The furthest of the others counts as one of this node does."""
    node = Node()
    assert not node.hangs_after()
    node.furthest = 8
    assert node.hangs_after(at_most_s=310) == 300
    assert "local rank 0 (pid 100) hangs" in node.look().hangs


@pytest.mark.parametrize("state", ["parking", "parked"])
def test_nobody_hangs(state: str) -> None:
    """Not those that are all at the same collective, however long; not one that is paused, nor one
    that tells nothing, nor while any of them moves."""
    node = Node()
    assert not node.hangs_after(at_most_s=2000)
    node.told[1] = replace(node.status(6), state=state)
    assert not node.hangs_after(at_most_s=2000)
    node.told[1] = node.status(None)
    assert not node.hangs_after(at_most_s=2000)
    assert node.look().collectives is None
    for _ in range(5):
        node.told = [
            node.status((node.told[0].collectives or 0) + 1),
            node.status(node.told[0].collectives or 0),
        ]
        assert not node.hangs_after(at_most_s=250)


def test_a_stopped_worker() -> None:
    """By a signal, not by a debugger; and only as long as the agent itself runs."""
    node = Node()
    node.states[100] = "t"
    assert not node.hangs_after(at_most_s=30)
    node.states[100] = "T"
    assert not node.hangs_after(at_most_s=4)
    node.now_s += 60  # all of the node was stopped
    assert node.hangs_after(at_most_s=10) == 5
    assert node.look().hangs == "local rank 0 (pid 100) has been stopped for 6 s (SIGSTOP)"


@pytest.mark.parametrize(
    ("state", "silent", "said"),
    [("D", False, "waits in the kernel"), ("R", True, "none of its threads runs Python")],
)
def test_what_is_said_of_others(state: str, silent: bool, said: str) -> None:
    """A file system that does not answer; somebody who keeps the interpreter."""
    node = Node()
    node.told[1] = node.status(6)
    for _ in range(320):
        node.look()
    node.states[101] = state
    old = node.told[1]
    node.look()
    if silent:
        node.told[1] = old
        node.now_s += 1.0
        last = replace(old, as_of=Moment(int((node.now_s - 100) * 1e9), 1))
        found = node.watch.look(
            WORKERS, [node.told[0], last], furthest=node.furthest, now_s=node.now_s
        )
        assert said in found.hangs
    else:
        assert said in node.look().hangs


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
