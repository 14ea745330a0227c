"""Which worker keeps the others waiting where there is no collective. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hydroslurm.core.registry import Entry
from hydroslurm.core.status import Moment, RankStatus
from hydroslurm.elastic.roster import Awaited, Timing
from hydroslurm.jobs.agent.progress import Absence, Use, meeting_s
from hydroslurm.jobs.agent.workers import Worker

WORKERS = (Worker(0, 100), Worker(1, 101))
MEETS = Awaited(meeting_s=600.0)
ENDED = Awaited(ended=True)


class Node:
    """Two workers, second after second; neither has come to init_process_group."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.used: dict[int, Use] = {100: (0.0, 0), 101: (0.0, 0)}
        self.told: list[RankStatus | None] = [self.status(), self.status()]
        self.ended: list[int] = []
        self.absence = Absence(
            Timing(stuck_s=900.0), use_of=self.used.__getitem__, state_of=lambda _: "S"
        )

    def status(self, **more: Any) -> RankStatus:
        return RankStatus(0, "running", Moment(1, 1), heartbeat_s=10.0, **more)

    def look(self, awaited: Awaited, *, by_s: float = 1.0) -> str:
        self.now_s += by_s
        now = Moment(int(self.now_s * 1e9), 1)
        told = [one and replace(one, as_of=now) for one in self.told]
        return self.absence.look(WORKERS, told, ended=self.ended, awaited=awaited, now_s=self.now_s)

    def hangs_after(
        self, awaited: Awaited, *, most_s: int = 2000, cpu: float = 0.0, moved: int = 0
    ) -> int:
        """Seconds until somebody hangs, while the second one uses so much a second; 0 if that does
        not come."""
        for second in range(most_s):
            used_s, bytes_ = self.used[101]
            self.used[101] = (used_s + cpu, bytes_ + moved)
            if self.look(awaited):
                return second
        return 0


def test_workers_that_do_not_come() -> None:
    """Those that do nothing, after half of the time-out of the others; one that has come is not
    waited for, and its coming gives the other its time again."""
    node = Node()
    node.told[0] = node.status(stands_at="train.py:7 in f")
    node.told[1] = None
    assert node.hangs_after(MEETS) == 300
    first, second = node.look(MEETS).split("; ")
    assert first.startswith("local rank 0 (pid 100) hangs: it stands at train.py:7 in f, and has")
    assert "init_process_group, which fails after 600 s" in first
    assert second.startswith("local rank 1 (pid 101) hangs: it has not come to its `import torch`")
    node.told[1] = node.status(meeting_timeout_s=3000.0)
    assert node.look(MEETS) == ""
    assert node.hangs_after(Awaited()) == 899
    assert "local rank 1" not in node.look(Awaited())
    assert meeting_s(node.told) == 3000.0


@pytest.mark.parametrize(("cpu", "moved"), [(0.1, 0), (0.0, 20 << 10)])
@pytest.mark.parametrize("awaited", [MEETS, ENDED])
def test_nobody_who_may_wait_for_a_busy_one_hangs(awaited: Awaited, cpu: float, moved: int) -> None:
    """A worker that downloads or computes, and its neighbour that waits for it."""
    assert not Node().hangs_after(awaited, cpu=cpu, moved=moved)


def test_nobody_hangs() -> None:
    """Nobody is waited for; all have come, or have a process group; somebody is paused; the agent
    itself was stopped."""
    node = Node()
    assert not node.hangs_after(Awaited())
    assert not node.hangs_after(Awaited(collectives=7))
    node.told = [node.status(meeting_timeout_s=600.0), node.status(collectives=0)]
    assert not node.hangs_after(MEETS)
    node.told = [node.status(), replace(node.status(), state="parked")]
    assert not node.hangs_after(MEETS)
    node.told[1] = node.status()
    assert not node.hangs_after(MEETS, most_s=299)
    assert node.look(MEETS, by_s=400.0) == ""


@pytest.mark.parametrize("here", [True, False])
def test_one_that_does_not_end(here: bool) -> None:
    """Once another has, of this node or elsewhere; whatever process groups it had."""
    node = Node()
    node.ended = [0] if here else []
    awaited = Awaited() if here else ENDED
    node.told[0] = node.status(collectives=7)
    node.told[1] = replace(node.status(collectives=7), state="ended")
    assert node.hangs_after(awaited) == 900
    said = node.look(awaited)
    assert "local rank 1 (pid 101) hangs: it has ended its script, and does not exit, and" in said
    assert said.endswith("while other ranks have ended")
    assert ("local rank 0" in said) is not here


def test_looks_that_come_fast_count_as_one() -> None:
    """One hundredth of a second, which the kernel counts in, is much of a short time."""
    node = Node()
    for number in range(302 * 50):
        node.used[101] = (number // 1000 / 100, 0)
        if node.look(MEETS, by_s=0.02):
            break
    assert 300 <= number / 50 <= 302


def test_the_pid_that_is_named_is_the_ranks() -> None:
    """Below a shell script it is another than torchrun's."""
    node = Node()
    workers = (Worker(0, 100, Entry(777, 1, 0, "", {})),)
    for _ in range(400):
        node.now_s += 1
        said = node.absence.look(workers, [node.told[0]], ended=(), awaited=MEETS, now_s=node.now_s)
    assert "(pid 777)" in said
