"""Where a rank is put: on machines that are folders, and on this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hydroslurm
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.numa import binding, memory
from hydroslurm.numa.binding import choose, has_own_cores
from hydroslurm.numa.topology import (
    Topology,
    format_list,
    node_of_device,
    parse_list,
    read_topology,
)

TWO = {0: "0-3,8-11", 1: "4-7,12,14-15"}
EIGHT = {node: f"{node * 4}-{node * 4 + 1},{node * 4 + 3}" for node in range(8)}


def machine(root: Path, nodes: dict[int, str], devices: dict[str, int] | None = None) -> Path:
    """A folder as the kernel's /sys; a node with an empty list is memory alone."""
    for node, cpus in nodes.items():
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
    (root / "devices/system/node/possible").write_text("0-63\n")
    for pci, node in (devices or {}).items():
        folder = root / "bus/pci/devices" / pci
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return root


def topology(root: Path, nodes: dict[int, str], allowed: str = "0-63") -> Topology:
    found = read_topology(parse_list(allowed), sysfs=machine(root, nodes), status=root / "none")
    assert found is not None
    return found


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2-3,9", "1-2,4-5,63-65"])
def test_lists_are_the_kernels(text: str) -> None:
    """A list of processors is read and written as the kernel writes it."""
    assert format_list(parse_list(text + "\n")) == (text or "none")
    with pytest.raises(ValueError):
        parse_list("0-x")


def test_nodes_with_holes_and_a_cpuset(tmp_path: Path) -> None:
    """Each node keeps those of its processors that the cpuset allows; one without any stays known,
    and one of memory alone is none."""
    found = topology(tmp_path, {**TWO, 2: ""}, allowed="1-2,9,20")
    assert dict(found.nodes) == {0: {1, 2, 9}, 1: frozenset()}
    assert found.usable == [0]


def test_what_memory_is_allowed(tmp_path: Path) -> None:
    """Mems_allowed_list of the process counts; without it, all nodes."""
    (tmp_path / "status").write_text("Name:\tpython\nMems_allowed:\t1\nMems_allowed_list:\t1\n")
    root = machine(tmp_path / "sys", TWO)
    found = read_topology([0, 4], sysfs=root, status=tmp_path / "status")
    assert found is not None
    assert found.memory == {1}
    unknown = read_topology([0, 4], sysfs=root, status=tmp_path / "nowhere")
    assert unknown is not None
    assert unknown.memory == {0, 1}


def test_without_nodes(tmp_path: Path) -> None:
    """A kernel that describes no nodes: nothing is bound, and the line says so."""
    before = os.sched_getaffinity(0)
    done = binding.bind(environ={}, sysfs=tmp_path)
    assert done.place is None
    assert "describes no NUMA nodes" in done.message
    assert os.sched_getaffinity(0) == before


def test_rank_goes_to_the_node_of_its_device(tmp_path: Path) -> None:
    """All cores of that node that are allowed, whatever its local rank is."""
    place = choose(
        topology(tmp_path, TWO, allowed="0-12"),
        local_rank=0,
        local_world_size=4,
        device="0000:3b:00.0",
        node=1,
    )
    assert (place.nodes, place.cpus) == ((1,), {4, 5, 6, 7, 12})
    assert "that of its device 0000:3b:00.0" in place.why


@pytest.mark.parametrize("number", [-1, None])
def test_device_without_a_node(tmp_path: Path, number: int | None) -> None:
    """A device that the kernel puts on node -1, or does not know: shared out evenly, and said."""
    pci = "0000:3b:00.0"
    root = machine(tmp_path, TWO, {} if number is None else {pci: number})
    found = read_topology(range(16), sysfs=root, status=tmp_path / "none")
    assert found is not None
    node = node_of_device(pci, sysfs=root)
    assert node is None
    place = choose(found, local_rank=3, local_world_size=4, device=pci, node=node)
    assert place.nodes == (1,)
    assert "does not know the node of its device" in place.why


def test_cpuset_that_cuts_the_devices_node_off(tmp_path: Path) -> None:
    """The rank stays inside its cpuset, and is told how to get cores beside its device."""
    found = topology(tmp_path, TWO, allowed="0-3")
    place = choose(found, local_rank=1, local_world_size=2, device="0000:3b:00.0", node=1)
    assert (place.nodes, place.cpus) == ((0,), {0, 1, 2, 3})
    assert "allows no core" in place.why
    assert "--gres-flags=enforce-binding" in place.why


@pytest.mark.parametrize(
    ("nodes", "ranks", "shares"),
    [
        (TWO, 2, [(0,), (1,)]),
        (TWO, 4, [(0,), (0,), (1,), (1,)]),
        (TWO, 3, [(0,), (0,), (1,)]),
        (TWO, 1, [(0, 1)]),
        (EIGHT, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (EIGHT, 8, [(n,) for n in range(8)]),
        (EIGHT, 3, [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (EIGHT, 16, [(n // 2,) for n in range(16)]),
    ],
)
def test_shared_out_evenly(
    tmp_path: Path, nodes: dict[int, str], ranks: int, shares: list[tuple[int, ...]]
) -> None:
    """Without devices the ranks share the nodes, each node the same number of times or each rank
    the same number of nodes, give or take one."""
    found = topology(tmp_path, nodes)
    places = [choose(found, local_rank=rank, local_world_size=ranks) for rank in range(ranks)]
    assert [place.nodes for place in places] == shares
    for place in places:
        assert place.cpus == frozenset().union(*(parse_list(nodes[n]) for n in place.nodes))


def test_cores_that_srun_shared_out_already(tmp_path: Path) -> None:
    """A task that has cores of its own keeps them all, for nobody else would use them."""
    own = {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x11,0x22"}
    same = {**own, "SLURM_CPU_BIND_LIST": "0x33,0x33"}
    assert has_own_cores(own)
    assert not has_own_cores(same)
    assert not has_own_cores({})
    found = topology(tmp_path, TWO, allowed="0,4")
    place = choose(found, local_rank=1, local_world_size=2, has_own_cores=True)
    assert (place.nodes, place.cpus) == ((0, 1), {0, 4})


def test_memory_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel, a container or the machine does not allow one, the reason is a sentence."""
    assert memory.set_policy([0], "none") is None
    assert "is not known for vax" in str(memory.set_policy([0], "preferred", machine="vax"))
    seen: list[tuple[int, list[int]]] = []

    def call(number: int, mode: int, nodes: list[int]) -> int:
        seen.append((mode, list(nodes)))
        return 22 if mode == 5 else 1 if mode == 2 else 0

    monkeypatch.setattr(memory, "_call", call)
    assert memory.set_policy([1, 3], "preferred") is None  # of a kernel that takes one node only
    assert "--cap-add SYS_NICE" in str(memory.set_policy([1], "strict"))
    assert seen == [(5, [1, 3]), (1, [1]), (2, [1])]


def test_bad_arguments() -> None:
    """What is wrong is named with what would be right."""
    with pytest.raises(UsageError, match="preferred, strict, none"):
        binding.bind(memory="all")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="contradict"):
        binding.bind(environ={"RANK": "4", "WORLD_SIZE": "2"})


CHILD = """
import ctypes, json, os, sys, threading
started, leave = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (started.set(), leave.wait()))
thread.start(); started.wait()
import hydroslurm
done = hydroslurm.numa.bind(memory=sys.argv[1])
mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
assert ctypes.CDLL(None).syscall(239, ctypes.byref(mode), mask, 1024, None, 0) == 0
cpus = sorted(os.sched_getaffinity(thread.native_id))
print(json.dumps([cpus, mode.value, mask[0], done.memory]))
leave.set(); thread.join()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the system call's number is x86_64's")
@pytest.mark.parametrize(("policy", "mode"), [("preferred", 1), ("strict", 2), ("none", 0)])
def test_on_this_machine(policy: str, mode: int) -> None:
    """All threads run where they may, the kernel says that the policy is in force, and one line
    says what was done."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, policy], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    cpus, seen, mask, told = json.loads(done.stdout)
    if told != policy:  # a container that forbids it has said so
        assert "its memory is not bound" in done.stderr
        return
    assert (seen, mask & 1) == (mode, int(policy != "none"))
    assert set(cpus) <= os.sched_getaffinity(0)
    (line,) = done.stderr.splitlines()
    assert line.startswith("hydroslurm: rank 0 bound to NUMA node")


def test_for_an_unmodified_script(tmp_path: Path) -> None:
    """`hydroslurm run --bind-numa` binds when torch comes, and the run's events tell it."""
    command = [sys.executable, "-m", "hydroslurm.cli", "run", "--bind-numa", "--"]
    done = subprocess.run(
        [*command, sys.executable, "-c", "import torch; torch.ones(1)"],
        env={**os.environ, "HYDROSLURM_RUN_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("bound to NUMA node") == 1
    log = RunDir(tmp_path).rank_events(0)
    (told,) = [one for one in read_events(log) if one.kind is EventKind.NUMA_BOUND]
    assert told.data["message"] in done.stderr
    assert parse_list(told.data["cpus"]) <= os.sched_getaffinity(0)


def test_after_install_it_is_an_event_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that binds itself later tells its events at once."""
    monkeypatch.setattr(binding, "bindings", [])
    monkeypatch.setattr(binding, "_bind", lambda *_: binding.Binding(0, 0, None, "none", "tried"))
    with hydroslurm.installed(run_dir=tmp_path):
        binding.bind(environ={})
    kinds = [one.kind for one in read_events(RunDir(tmp_path).rank_events(0))]
    assert kinds.count(EventKind.NUMA_BOUND) == 1
