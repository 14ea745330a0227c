"""Gradients that are reduced on the host: the numbers, what goes wrong, and pauses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from coordination.attempts import Attempt
from parallel.conftest import Begin
from processes import cpu_s, wait_until

from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.parallel.nodes import group, here

SCENES = {
    # all types, odd sizes, unequal buckets, no_sync, unused parameters, static graphs, views, other
    # types of sums and wires
    "numbers": ([1], [2], [1, 1], [2, 1]),
    # other buckets and other pieces
    "places": ([2, 1],),
    "part": ([3], [2, 1]),
    "ends": ([2, 1],),
    # bad types, ranks that disagree, sparse gradients
    "refuses": ([1, 1],),
    # no thread, descriptor or memory of a model that is gone
    "leaves_nothing": ([2, 1],),
}


@pytest.mark.parametrize(
    ("scene", "nodes"), [(scene, nodes) for scene in SCENES for nodes in SCENES[scene]], ids=str
)
def test_what_all_ranks_find(begin: Begin, scene: str, nodes: list[int]) -> None:
    """On every rank the scene of crew.py holds; and nothing is left in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    ranks = begin(scene, nodes)
    said = ranks.end().said
    assert set(ranks.codes.values()) == {0}, said
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [name for name in left if "hydroslurm" in str(name)]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed(begin: Begin, victim: int) -> None:
    """A first rank of a node, another one, one on the other node: the rest fail long before the
    time-out, and those on its node name it."""
    ranks = begin("dies", [2, 1], victim=victim, timeout_s=60)
    said = ranks.end().said
    assert ranks.codes == {rank: -9 if rank == victim else 0 for rank in range(3)}, said
    assert said.count("failed:") == 2
    if victim < 2:
        assert f"rank {victim} ended while gradients were being reduced" in said
    assert "could not be exchanged between nodes" in said


def test_a_rank_that_does_not_come(begin: Begin) -> None:
    """The time-out of the process group holds, and the message says who is missing."""
    ranks = begin("late", [3], timeout_s=2)
    said = ranks.end().said
    assert said.count("ranks [1] have not brought their gradients") == 2, said


def test_ranks_pause_between_two_reductions(begin: Begin, tmp_path: Path) -> None:
    """One rank is paused: all park with no reduction in flight, sleep, and go on."""
    run = RunDir(tmp_path / "run")
    stop = tmp_path / "stop"
    ranks = begin("trains", [2, 1], run_dir=str(run.root), stop=str(stop))
    wait_until(lambda: has(run, EventKind.RANKS_JOINED, 1), "the ranks to meet")
    for number in range(1, 4):
        os.kill(ranks.pids[number % 3], signal.SIGUSR1)
        wait_until(lambda n=number: has(run, EventKind.ALL_PARKED, n), f"pause {number}")
        if number == 1:
            assert_asleep(ranks)
        places = parked_at(ranks, number)
        assert len(set(places.values())) == 1, places
        assert set(places.values()).pop() % 1000 == 0  # none is in flight
        os.kill(ranks.pids[number % 3], signal.SIGUSR2)
        wait_until(lambda n=number: has(run, EventKind.RESUMED, n), "the ranks to go on")
        step = steps(ranks)
        wait_until(lambda s=step: steps(ranks) > s + 1, "steps after the pause")
    stop.touch()
    said = ranks.end().said
    assert set(ranks.codes.values()) == {0}, said
    for rank in range(3):
        told = [
            one for one in read_events(run.rank_events(rank)) if one.kind is EventKind.ALL_PARKED
        ]
        assert [one.data["in_flight"] for one in told] == [0, 0, 0]


def has(run: RunDir, kind: EventKind, times: int) -> bool:
    """Whether all three ranks have so many of these events."""
    logs = [run.rank_events(rank) for rank in range(3)]
    return all(log.exists() for log in logs) and all(
        sum(one.kind is kind for one in read_events(log)) >= times for log in logs
    )


def parked_at(ranks: Attempt, pause: int) -> dict[int, int]:
    """What each parked rank tells of itself: 1000 times the reductions issued, and those in
    flight."""
    places: dict[int, int] = {}
    while len(places) < 3:
        rank, _, place = ranks.crew.expect(f"pause {pause} rank ").partition(" at ")
        places[int(rank)] = int(place)
    return places


def steps(ranks: Attempt) -> int:
    """The latest step that rank 0 has printed, as a count of its lines."""
    return sum(line.startswith("rank 0 step") for line in ranks.crew.lines[ranks.begin :])


def assert_asleep(ranks: Attempt) -> None:
    """Parked ranks take next to no processor time."""

    before_s = sum(map(cpu_s, ranks.pids.values()))
    signal.sigtimedwait([signal.SIGRTMAX], 1.0)
    assert sum(map(cpu_s, ranks.pids.values())) - before_s < 0.6  # of the second of each of three


# --- nodes


def test_ranks_by_node() -> None:
    """Those of one machine are on one node, in order, unless the launcher tells them apart."""
    names = [here({"GROUP_RANK": number, "SLURM_NODEID": "7"}) for number in "0101"]
    found = group(names, 3)
    assert (found.members, found.node, found.local_rank) == (((0, 2), (1, 3)), 1, 1)
    by_srun = [here({"SLURM_NODEID": number}) for number in "001"]
    assert group(by_srun, 2).members == ((0, 1), (2,))
    assert group([here({})] * 3, 1).members == ((0, 1, 2),)
