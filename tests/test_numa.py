"""Where a rank is put: on machines that are folders, and on this one."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from processes import captured

import hydroslurm
from hydroslurm import numa
from hydroslurm.core.events import EventKind, read_events
from hydroslurm.core.rundir import RunDir
from hydroslurm.errors import UsageError
from hydroslurm.numa import (
    choose,
    format_list,
    has_own_cores,
    node_of_device,
    parse_list,
    read_nodes,
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


def nodes_of(root: Path, nodes: dict[int, str], allowed: str = "0-63") -> dict[int, frozenset[int]]:
    return read_nodes(parse_list(allowed), sysfs=machine(root, nodes))


@pytest.mark.parametrize("text", ["", "0", "0-3", "0,2-3,9", "1-2,4-5,63-65"])
def test_lists_are_the_kernels(text: str) -> None:
    """A list of processors is read and written as the kernel writes it."""
    assert format_list(parse_list(text + "\n")) == text
    with pytest.raises(ValueError):
        parse_list("0-x")


def test_nodes_with_holes_and_a_cpuset(tmp_path: Path) -> None:
    """Each node keeps those of its processors that the cpuset allows; one without any stays known,
    and one of memory alone is none."""
    found = nodes_of(tmp_path, {**TWO, 2: ""}, allowed="1-2,9,20")
    assert found == {0: {1, 2, 9}, 1: frozenset()}
    assert choose(found, local_rank=0, local_world_size=1)[0] == (0,)


def test_without_nodes(tmp_path: Path) -> None:
    """A kernel that describes no nodes: nothing is bound, and the line says so."""
    before = os.sched_getaffinity(0)
    done = numa.bind(environ={}, sysfs=tmp_path)
    assert done.nodes == ()
    assert "describes no NUMA nodes" in done.message
    assert os.sched_getaffinity(0) == before


def test_rank_goes_to_the_node_of_its_device(tmp_path: Path) -> None:
    """All cores of that node that are allowed, whatever its local rank is."""
    found = nodes_of(tmp_path, TWO, allowed="0-12")
    nodes, why = choose(found, local_rank=0, local_world_size=4, device="0000:3b:00.0", node=1)
    assert (nodes, found[1]) == ((1,), {4, 5, 6, 7, 12})
    assert "that of its device 0000:3b:00.0" in why


@pytest.mark.parametrize("number", [-1, None])
def test_device_without_a_node(tmp_path: Path, number: int | None) -> None:
    """A device that the kernel puts on node -1, or does not know: shared out evenly, and said."""
    pci = "0000:3b:00.0"
    root = machine(tmp_path, TWO, {} if number is None else {pci: number})
    found = read_nodes(range(16), sysfs=root)
    node = node_of_device(pci, sysfs=root)
    assert node is None
    nodes, why = choose(found, local_rank=3, local_world_size=4, device=pci, node=node)
    assert nodes == (1,)
    assert "does not know the node of its device" in why


def test_cpuset_that_cuts_the_devices_node_off(tmp_path: Path) -> None:
    """The rank stays inside its cpuset, and is told how to get cores beside its device."""
    found = nodes_of(tmp_path, TWO, allowed="0-3")
    nodes, why = choose(found, local_rank=1, local_world_size=2, device="0000:3b:00.0", node=1)
    assert (nodes, found[0]) == ((0,), {0, 1, 2, 3})
    assert "allows no core" in why
    assert "--gres-flags=enforce-binding" in why


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
    found = nodes_of(tmp_path, nodes)
    assert found == {node: parse_list(cpus) for node, cpus in nodes.items()}
    chosen = [choose(found, local_rank=rank, local_world_size=ranks)[0] for rank in range(ranks)]
    assert chosen == shares


def test_cores_that_srun_shared_out_already(tmp_path: Path) -> None:
    """A task that has cores of its own keeps them all, for nobody else would use them."""
    own = {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x11,0x22"}
    same = {**own, "SLURM_CPU_BIND_LIST": "0x33,0x33"}
    assert has_own_cores(own)
    assert not has_own_cores(same)
    assert not has_own_cores({})
    found = nodes_of(tmp_path, TWO, allowed="0,4")
    nodes, _ = choose(found, local_rank=1, local_world_size=2, has_own_cores=True)
    assert (nodes, found) == ((0, 1), {0: {0}, 1: {4}})


def test_bad_arguments() -> None:
    """What is wrong is named with what would be right."""
    with pytest.raises(UsageError, match="contradict"):
        numa.bind(environ={"RANK": "4", "WORLD_SIZE": "2"})


def test_a_container_that_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is changed, the line says why, and the training goes on."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    first = min(os.sched_getaffinity(0))
    done = numa.bind(environ={}, sysfs=machine(tmp_path, {0: str(first)}))
    assert (done.nodes, done.cpus) == ((), os.sched_getaffinity(0))
    assert "not bound to NUMA node 0" in done.message
    assert "Operation not permitted" in done.message


class _Nvml:
    """NVIDIA's management library with one device."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.nvmlInit_v2 = self.nvmlShutdown = lambda: 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: object) -> int:
        self.asked.append(index)
        return 0

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: object) -> int:
        self.asked.append(name)
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: object, info: ctypes.Array[ctypes.c_char]) -> int:
        found = struct.pack("16s5I32s", b"0000:9D:00.0", 0, 0x9D, 0, 0, 0, b"00000000:9D:00.0")
        info[:] = found
        return 0


@pytest.mark.parametrize(
    ("visible", "asked"),
    [
        (None, 2),
        ("0,1,5,7", 5),
        ("3", 3),
        ("GPU-1,GPU-2,GPU-3", b"GPU-3"),
        ("0,1", None),
        ("", None),
    ],
)
def test_the_device_of_a_rank(
    visible: str | None, asked: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The visible one of its local number, or the only one; its address is spelled as in /sys."""
    nvml = _Nvml()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: nvml)
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = numa.pci_of_rank(2, environ)
    assert found == (None if asked is None else "0000:9d:00.0")
    assert nvml.asked == ([] if asked is None else [asked])


CHILD = """
import json, os, threading
started, leave = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (started.set(), leave.wait()))
thread.start(); started.wait()
import hydroslurm
done = hydroslurm.numa.bind()
print(json.dumps([sorted(os.sched_getaffinity(thread.native_id)), sorted(done.cpus)]))
leave.set(); thread.join()
"""


def test_on_this_machine() -> None:
    """All threads run where they may, and one line says what was done."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    cpus, told = json.loads(done.stdout)
    assert cpus == told
    assert set(cpus) <= os.sched_getaffinity(0)
    (line,) = done.stderr.splitlines()
    assert line.startswith("hydroslurm: rank 0 bound to NUMA node")


def test_for_an_unmodified_script(tmp_path: Path) -> None:
    """`hydroslurm run --bind-numa` binds when torch comes, and the run's events tell it."""
    command = [sys.executable, "-m", "hydroslurm.cli", "run", "--bind-numa", "--"]
    done = captured(
        [*command, sys.executable, "-c", "import torch; torch.ones(1)"],
        env={**os.environ, "HYDROSLURM_RUN_DIR": str(tmp_path)},
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
    monkeypatch.setattr(numa, "bindings", [])
    monkeypatch.setattr(numa, "read_nodes", lambda *_, **__: {})
    with hydroslurm.installed(run_dir=tmp_path):
        numa.bind(environ={})
    kinds = [one.kind for one in read_events(RunDir(tmp_path).rank_events(0))]
    assert kinds.count(EventKind.NUMA_BOUND) == 1
