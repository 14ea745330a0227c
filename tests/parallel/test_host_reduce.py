"""Gradients that are reduced on the host: the numbers, what goes wrong, and pauses."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from parallel.conftest import Begin
from processes import cpu_s, wait_until

from hydroslurm.core.events import Event, EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.parallel.nodes import group, here

SCENES = [
    # all types, odd sizes, unequal buckets, no_sync, unused parameters, static graphs, views, other
    # types of sums and wires; of three ranks: other buckets and pieces, a group of some of a node's
    # ranks, and that no thread, descriptor or memory of a model that is gone is left
    ("numbers", [1]),
    ("numbers", [2, 1]),
    ("ends", [2, 1]),
    # bad types, ranks that disagree, sparse gradients
    ("refuses", [1, 1]),
]
MORE = [("numbers", [2]), ("numbers", [1, 1]), ("numbers", [3])]


@pytest.mark.parametrize(
    ("scene", "nodes"),
    [*SCENES, *(pytest.param(*one, marks=pytest.mark.long) for one in MORE)],
    ids=str,
)
def test_what_all_ranks_find(begin: Begin, scene: str, nodes: list[int]) -> None:
    """On every rank the scene of crew.py holds; and nothing is left in /dev/shm."""
    before = set(Path("/dev/shm").iterdir())
    ranks = begin(scene, nodes)
    said = ranks.end().said
    assert set(ranks.codes.values()) == {0}, said
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [name for name in left if "hydroslurm" in str(name)]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed(begin: Begin, victim: int) -> None:
    """A first rank of a node, the one on the other node: the rest fail long before the time-out,
    and those on its node name it."""
    ranks = begin("dies", [2, 1], victim=victim, timeout_s=60)
    said = ranks.end().said
    assert ranks.codes == {rank: -9 if rank == victim else 0 for rank in range(3)}, said
    assert said.count("failed:") == 2
    if victim < 2:
        assert f"rank {victim} ended while gradients were being reduced" in said
    assert "could not be exchanged between nodes" in said


def test_a_rank_that_does_not_come(begin: Begin) -> None:
    """The time-out of the process group holds, and the message says who is missing."""
    ranks = begin("dies", [3], victim=1, late=True, timeout_s=2)
    said = ranks.end().said
    assert said.count("ranks [1] have not brought their gradients") == 2, said


def test_ranks_pause_between_two_reductions(begin: Begin, tmp_path: Path) -> None:
    """One rank is paused: all park with no reduction in flight, sleep, and go on."""
    run, stop = RunDir(tmp_path / "run"), tmp_path / "stop"
    ranks = begin("trains", [2, 1], run_dir=str(run.root), stop=str(stop))

    def all_tell(kind: EventKind, times: int) -> None:
        wait_until(
            lambda: len(one := told(run, kind)) == 3 and min(map(len, one)) >= times,
            f"{kind.value} {times}",
        )

    def steps() -> int:
        return sum(line.startswith("rank 0 step") for line in ranks.crew.lines[ranks.begin :])

    all_tell(EventKind.RANKS_JOINED, 1)
    for number in (1, 2):
        os.kill(ranks.pids[number], signal.SIGUSR1)
        all_tell(EventKind.ALL_PARKED, number)
        if number == 1:
            before_s = sum(map(cpu_s, ranks.pids.values()))
            signal.sigtimedwait([signal.SIGRTMAX], 1.0)
            # of the second of each of three
            assert sum(map(cpu_s, ranks.pids.values())) - before_s < 0.6
        places: dict[str, int] = {}
        while len(places) < 3:
            rank, _, place = ranks.crew.expect(f"pause {number} rank ").partition(" at ")
            places[rank] = int(place)
        (place,) = set(places.values())
        assert place % 1000 == 0  # none is in flight
        os.kill(ranks.pids[number], signal.SIGUSR2)
        all_tell(EventKind.RESUMED, number)
        before = steps()
        wait_until(lambda before=before: steps() > before + 1, "steps after the pause")
    stop.touch()
    said = ranks.end().said
    assert set(ranks.codes.values()) == {0}, said
    for events in told(run, EventKind.ALL_PARKED):
        assert [one.data["in_flight"] for one in events] == [0, 0]


def told(run: RunDir, kind: EventKind) -> list[list[Event]]:
    """What each of the three ranks has told of this kind."""
    logs = [run.rank_events(rank) for rank in range(3)]
    return [[one for one in read_events(log) if one.kind is kind] for log in logs if log.exists()]


# --- nodes


def test_ranks_by_node() -> None:
    """Those of one machine are on one node, in order, unless the launcher tells them apart."""
    names = [here({"GROUP_RANK": number, "SLURM_NODEID": "7"}) for number in "0101"]
    found = group(names, 3)
    assert (found.members, found.node, found.local_rank) == (((0, 2), (1, 3)), 1, 1)
    by_srun = [here({"SLURM_NODEID": number}) for number in "001"]
    assert group(by_srun, 2).members == ((0, 1), (2,))
    assert group([here({})] * 3, 1).members == ((0, 1, 2),)
