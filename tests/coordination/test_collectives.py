"""What torch tells about this rank's collectives, with real gloo groups of three ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from processes import child

from hydroslurm.coordination import collectives

ENVIRON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

JOB = """
    import os, sys, tempfile, threading, time, traceback, warnings

    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist
    from hydroslurm.coordination import collectives

    WORLD = 3

    def until(done):
        deadline = time.monotonic() + 60
        while not done():
            assert time.monotonic() < deadline, "never so"
            time.sleep(0.001)

    def issued():
        return {key: group.issued for key, group in collectives.groups().items()}

    def total(counts):
        return sum(counts.values())

    def keys_are_the_same_on_all_members(rank):
        dist.new_group([0, 1])
        dist.new_group([1, 2])
        dist.new_group([2, 0])
        dist.new_group([rank], use_local_synchronization=True)
        mine = collectives.groups()
        everybody = [None] * WORLD
        dist.all_gather_object(everybody, {key: one.ranks for key, one in mine.items()})
        assert len(mine) == 3, mine
        assert all(rank in one.ranks for one in mine.values())
        merged = {}
        for other, theirs in enumerate(everybody):
            for key, ranks in theirs.items():
                assert merged.setdefault(key, ranks) == ranks
        assert sorted(merged.values()) == [(0, 1), (0, 1, 2), (0, 2), (1, 2)] or \\
            sorted(merged.values()) == [(0, 1), (0, 1, 2), (1, 2), (2, 0)], merged
        for key, ranks in merged.items():
            assert [o for o in range(WORLD) if key in everybody[o]] == sorted(ranks)

    def every_collective_counts(rank):
        x = torch.ones(4)
        parts = [torch.ones(4) for _ in range(WORLD)]
        root = rank == 0
        for work in (
            lambda: dist.all_reduce(x),
            lambda: dist.broadcast(x, 0),
            lambda: dist.barrier(),
            lambda: dist.all_gather(parts, x),
            lambda: dist.all_gather_into_tensor(torch.empty(12), x),
            lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(12)),
            lambda: dist.reduce(x, 0),
            lambda: dist.gather(x, parts if root else None, dst=0),
            lambda: dist.scatter(x, parts if root else None, src=0),
            lambda: dist.all_to_all_single(torch.empty(12), torch.ones(12)),
        ):
            before = total(issued())
            work()
            assert total(issued()) == before + 1
        assert collectives.issued_exact() == issued()
        ((key, number),) = issued().items()
        assert collectives.progress() == collectives.Progress(key, number, 1800.0)
        until(lambda: collectives.in_flight() == 0)

    def sends_and_receives_are_taken_out(rank):
        x = torch.ones(4)
        pair = dist.new_group([0, 1])
        if rank == 0:
            for _ in range(5):
                dist.send(x, 1)
            dist.send(x, 1, group=pair)
        if rank == 1:
            for _ in range(5):
                dist.recv(x, 0)
            dist.recv(x, 0, group=pair)
        world = next(k for k, g in collectives.groups().items() if len(g.ranks) == WORLD)
        assert issued()[world] == (0 if rank == 2 else 5)
        dist.all_reduce(x)
        if rank == 0:
            dist.send(x, 1)
        if rank == 1:
            dist.recv(x, 0)
        assert issued()[world] == (1 if rank == 2 else 7)
        exact = collectives.issued_exact()
        assert exact[world] == 1, exact
        assert sorted(exact.values()) == ([1] if rank == 2 else [0, 1]), exact

    def what_waits_for_a_peer_is_in_flight(rank):
        folder = os.environ["FOLDER"]
        x = torch.ones(4)
        dist.barrier()
        until(lambda: collectives.in_flight() == 0)
        go = [os.path.join(folder, f"go-{peer}") for peer in (1, 2)]
        if rank == 0:
            until(lambda: all(map(os.path.exists, go)))  # both have looked
            dist.all_reduce(x)
        else:
            work = dist.all_reduce(x, async_op=True)
            assert collectives.in_flight() == 1
            assert total(issued()) == 2
            with open(go[rank - 1], "w"):
                pass
            work.wait()
        until(lambda: collectives.in_flight() == 0)

    def the_recorder_wraps(rank):
        x = torch.ones(1)
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(x, group=pair)
        for _ in range(9):
            dist.all_reduce(x)
        until(lambda: collectives.in_flight() == 0)
        if rank < 2:
            assert collectives.issued_exact() is None, collectives.issued_exact()
            dist.all_reduce(x, group=pair)
        assert collectives.issued_exact() == issued()

    def there_is_no_recorder(rank):
        assert collectives.in_flight() == 0
        dist.barrier()
        assert total(issued()) == 1
        assert collectives.in_flight() is None
        assert collectives.are_complete() is None
        assert collectives.issued_exact() is None
        assert not collectives.is_alone()

    def a_backend_is_not_recorded(rank):
        class Other(dist.ProcessGroup):
            def getBackendName(self):
                return "other"

        dist.Backend.register_backend(
            "other", lambda store, rank, size, limit: Other(rank, size), devices=["cpu"]
        )
        dist.new_group([0, 1], backend="other")
        dist.barrier()
        if rank == 2:  # it is in no such group
            until(collectives.are_complete)
        seen = collectives.in_flight(), collectives.are_complete()
        assert seen == ((0, True) if rank == 2 else (None, None)), seen
        dist.barrier()
        os._exit(0)

    def a_group_that_was_destroyed_is_forgotten(rank):
        for _ in range(4):
            dist.barrier()
        dist.destroy_process_group()
        assert issued() == collectives.groups() == {}
        assert collectives.in_flight() == 0
        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ['FOLDER']}/second", rank=rank, world_size=WORLD
        )
        dist.barrier()
        assert total(issued()) == 1
        assert total(collectives.issued_exact()) == 1
        until(lambda: collectives.in_flight() == 0)

    def live(scene, rank):
        os.environ.update(BUFFER.get(scene, {}))
        assert issued() == {} and collectives.in_flight() == 0
        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ['FOLDER']}/store", rank=rank, world_size=WORLD
        )
        globals()[scene](rank)
        dist.barrier()
        dist.destroy_process_group()

    BUFFER = {
        "the_recorder_wraps": {"TORCH_FR_BUFFER_SIZE": "4"},
        "there_is_no_recorder": {"TORCH_FR_BUFFER_SIZE": "0"},
    }
    print("ready", flush=True)
    for line in sys.stdin:
        scene, pids = line.strip(), []
        with tempfile.TemporaryDirectory(dir=sys.argv[1]) as folder:
            os.environ["FOLDER"] = folder
            for rank in range(WORLD):
                pids.append(os.fork())
                if pids[-1] == 0:
                    try:
                        live(scene, rank)
                    except BaseException:
                        print(f"rank {rank}: {traceback.format_exc()}", flush=True)
                        os._exit(1)
                    os._exit(0)
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print("ended", scene, "OK" if codes == [0] * WORLD else f"FAILED {codes}", flush=True)
"""

SCENES = {
    "keys_are_the_same_on_all_members": "each group of several ranks has one key, its members'",
    "every_collective_counts": "each kind of collective counts one, and is complete in the end",
    "sends_and_receives_are_taken_out": "the exact numbers are those of the collectives alone",
    "what_waits_for_a_peer_is_in_flight": "a collective is in flight until its last rank comes",
    "the_recorder_wraps": "no number is made up for a group whose entries are gone",
    "there_is_no_recorder": "without the recorder nothing is claimed",
    "a_backend_is_not_recorded": "nothing is claimed of a group whose backend it does not know",
    "a_group_that_was_destroyed_is_forgotten": "a new group of the same name starts at nothing",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each scene, and all that the ranks said."""
    folder = tmp_path_factory.mktemp("groups")
    with child(JOB, folder, str(folder), environ=ENVIRON) as job:
        job.expect("ready")
        ends = {}
        for scene in SCENES:
            job.say(scene)
            ends[scene] = job.expect(f"ended {scene}", limit_s=120)
        return {scene: end if end == "OK" else str(job) for scene, end in ends.items()}


@pytest.mark.parametrize("scene", list(SCENES), ids=list(SCENES.values()))
def test_groups_of_three_ranks(said: dict[str, str], scene: str) -> None:
    """What the scene's name says holds on every rank."""
    assert said[scene] == "OK"


def test_torch_has_the_private_names() -> None:
    """The installed torch has every private name that is used; without one an answer would be None
    or empty."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    assert torch.distributed.is_available()
    assert isinstance(distributed_c10d._world.pg_group_ranks, dict)
    assert callable(dist.ProcessGroup._get_sequence_number_for_group)
    assert hasattr(dist.ProcessGroup, "group_name")
    assert any(hasattr(torch._C._distributed_c10d, name) for name in collectives._DUMPS)


def test_torch_is_not_imported(tmp_path: Path) -> None:
    """In a process without torch every answer is there at once, and torch is still not."""
    code = (
        "import sys; from hydroslurm.coordination import collectives as c; "
        "assert (c.groups(), c.issued_exact(), c.in_flight()) == ({}, {}, 0); "
        "assert c.progress() is None; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, check=True)


def test_names_that_are_missing_make_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the registry or the recorder is answered for, not failed with."""

    class Empty:
        pass

    class Group:
        group_name = "0"

        def _get_sequence_number_for_group(self) -> int:
            return 3

    class World:
        def __init__(self) -> None:
            self.pg_group_ranks = {Group(): {0: 0, 1: 1}, Empty(): {0: 0, 1: 1}}

    bare = Empty()
    monkeypatch.setitem(sys.modules, collectives._DISTRIBUTED, bare)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, collectives._NATIVE, Empty())  # type: ignore[arg-type]
    assert collectives.groups() == {}
    assert collectives.in_flight() == 0
    bare._world = World()  # type: ignore[attr-defined]
    assert [group.issued for group in collectives.groups().values()] == [3]
    assert collectives.progress() == collectives.Progress(*collectives.groups(), 3, None)
    assert collectives.in_flight() is None
    assert collectives.issued_exact() is None
