"""Which worker hangs or keeps the others waiting, and how fast they are, by what they tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hydroslurm.core.registry import Entry
from hydroslurm.core.status import Moment, RankStatus
from hydroslurm.elastic.roster import Awaited, Timing
from hydroslurm.jobs.agent.progress import Progress, Use, Watch, meeting_s
from hydroslurm.jobs.agent.workers import Worker

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

    def look(self) -> Progress:
        self.told = self._tell(1.0)
        return self.watch.look(WORKERS, self.told, furthest=self.furthest, now_s=self.now_s)

    def miss(self, awaited: Awaited, *, by_s: float = 1.0) -> str:
        """Who keeps the others waiting where there is no collective."""
        told = self._tell(by_s)
        return self.watch.look_outside(
            WORKERS, told, ended=self.ended, awaited=awaited, now_s=self.now_s
        )

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
            if self.look().hangs if awaited is None else self.miss(awaited):
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


def test_one_of_another_node_waits() -> None:
    """The furthest of the others counts as one of this node does."""
    node = Node()
    assert not node.hangs_after()
    node.furthest = 8
    assert node.hangs_after(most_s=310) == 300
    assert "local rank 0 (pid 100) hangs" in node.look().hangs


@pytest.mark.parametrize("state", ["parking", "parked"])
def test_nobody_hangs_in_a_collective(state: str) -> None:
    """Not those that are all at the same collective, however long; not one that is paused, nor one
    that tells nothing, nor while any of them moves."""
    node = Node()
    assert not node.hangs_after(most_s=2000)
    node.told[1] = replace(node.status(6), state=state)
    assert not node.hangs_after(most_s=2000)
    node.told[1] = node.status(None)
    assert not node.hangs_after(most_s=2000)
    assert node.look().collectives is None
    for number in range(8, 13):
        node.told = [node.status(number), node.status(number - 1)]
        assert not node.hangs_after(most_s=250)


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


def test_workers_that_do_not_come() -> None:
    """Those that do nothing, after half of the time-out of the others; one that has come is not
    waited for, and its coming gives the other its time again."""
    node = Node(None)
    node.told[0] = node.status(stands_at="train.py:7 in f")
    node.told[1] = None
    assert node.hangs_after(MEETS) == 300
    first, second = node.miss(MEETS).split("; ")
    assert first.startswith("local rank 0 (pid 100) hangs: it stands at train.py:7 in f, and has")
    assert "init_process_group, which fails after 600 s" in first
    assert second.startswith("local rank 1 (pid 101) hangs: it has not come to its `import torch`")
    node.told[1] = node.status(meeting_timeout_s=3000.0)
    assert node.miss(MEETS) == ""
    assert node.hangs_after(Awaited()) == 899
    assert "local rank 1" not in node.miss(Awaited())
    assert meeting_s(node.told) == 3000.0


@pytest.mark.parametrize(("cpu", "moved"), [(0.1, 0), (0.0, 20 << 10)])
@pytest.mark.parametrize("awaited", [MEETS, ENDED])
def test_nobody_who_may_wait_for_a_busy_one_hangs(awaited: Awaited, cpu: float, moved: int) -> None:
    """A worker that downloads or computes, and its neighbour that waits for it."""
    assert not Node(None).hangs_after(awaited, cpu=cpu, moved=moved)


def test_nobody_is_missed() -> None:
    """Nobody is waited for; all have come, or have a process group; somebody is paused; the agent
    itself was stopped."""
    node = Node(None)
    assert not node.hangs_after(Awaited())
    assert not node.hangs_after(Awaited(collectives=7))
    node.told = [node.status(meeting_timeout_s=600.0), node.status(collectives=0)]
    assert not node.hangs_after(MEETS)
    node.told = [node.status(), replace(node.status(), state="parked")]
    assert not node.hangs_after(MEETS)
    node.told[1] = node.status()
    assert not node.hangs_after(MEETS, most_s=299)
    assert node.miss(MEETS, by_s=400.0) == ""


@pytest.mark.parametrize("here", [True, False])
def test_one_that_does_not_end(here: bool) -> None:
    """Once another has, of this node or elsewhere; whatever process groups it had."""
    node = Node(None)
    node.ended = [0] if here else []
    awaited = Awaited() if here else ENDED
    node.told[0] = node.status(collectives=7)
    node.told[1] = replace(node.status(collectives=7), state="ended")
    assert node.hangs_after(awaited) == 900
    said = node.miss(awaited)
    assert "local rank 1 (pid 101) hangs: it has ended its script, and does not exit, and" in said
    assert said.endswith("while other ranks have ended")
    assert ("local rank 0" in said) is not here


def test_looks_that_come_fast_count_as_one() -> None:
    """One hundredth of a second, which the kernel counts in, is much of a short time."""
    node = Node(None)
    for number in range(302 * 50):
        node.used[101] = (number // 1000 / 100, 0)
        if node.miss(MEETS, by_s=0.02):
            break
    assert 300 <= number / 50 <= 302


def test_the_pid_that_is_named_is_the_ranks() -> None:
    """Below a shell script it is another than torchrun's."""
    node = Node(None)
    workers = (Worker(0, 100, Entry(777, 1, 0, "", {})),)
    for _ in range(400):
        node.now_s += 1
        said = node.watch.look_outside(
            workers, [node.told[0]], ended=(), awaited=MEETS, now_s=node.now_s
        )
    assert "(pid 777)" in said
