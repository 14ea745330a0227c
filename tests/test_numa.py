"""Where a rank is put: on machines that are folders, and on this one."""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys
from pathlib import Path

import pytest
from processes import captured

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


@pytest.mark.parametrize(
    ("allowed", "rank", "node", "nodes", "words"),
    [
        # all cores of that node that are allowed, whatever its local rank is
        ("0-12", 0, 1, (1,), "that of its device 0000:3b:00.0"),
        # the kernel puts it on node -1, or does not know it: shared out evenly, and said
        ("0-15", 3, -1, (1,), "does not know the node of its device"),
        ("0-15", 3, None, (1,), "does not know the node of its device"),
        # the rank stays inside its cpuset, and is told how to get cores beside its device
        ("0-3", 1, 1, (0,), "allows no core.*--gres-flags=enforce-binding"),
    ],
)
def test_rank_goes_to_the_node_of_its_device(
    tmp_path: Path, allowed: str, rank: int, node: int | None, nodes: tuple[int], words: str
) -> None:
    """Each node keeps those of its processors that the cpuset allows; one without any stays known,
    and one of memory alone is none."""
    pci = "0000:3b:00.0"
    root = machine(tmp_path, {**TWO, 2: ""}, {} if node is None else {pci: node})
    found = read_nodes(parse_list(allowed), sysfs=root)
    assert found == {n: parse_list(cpus) & parse_list(allowed) for n, cpus in TWO.items()}
    known = node_of_device(pci, sysfs=root)
    assert known == (None if node == -1 else node)
    chosen, why = choose(found, local_rank=rank, local_world_size=4, device=pci, node=known)
    assert chosen == nodes
    assert re.search(words, why, re.DOTALL)


def test_without_nodes(tmp_path: Path) -> None:
    """A kernel that describes no nodes: nothing is bound, and the line says so. Ranks that
    contradict each other are refused."""
    with pytest.raises(UsageError, match="contradict"):
        numa.bind(environ={"RANK": "4", "WORLD_SIZE": "2"})
    before = os.sched_getaffinity(0)
    done = numa.bind(environ={}, sysfs=tmp_path)
    assert done.nodes == ()
    assert "describes no NUMA nodes" in done.message
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("nodes", "ranks", "shares"),
    [
        (TWO, 4, [(0,), (0,), (1,), (1,)]),
        (TWO, 3, [(0,), (0,), (1,)]),
        (TWO, 1, [(0, 1)]),
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
        self.nvmlDeviceGetHandleByIndex_v2 = self.nvmlDeviceGetHandleByUUID = self._handle

    def _handle(self, name: object, handle: object) -> int:
        self.asked.append(name)
        return 0

    def nvmlDeviceGetPciInfo_v3(self, handle: object, info: ctypes.Array[ctypes.c_char]) -> int:
        info[:] = struct.pack("16s5I32s", b"0000:9D:00.0", 0, 0x9D, 0, 0, 0, b"00000000:9D:00.0")
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


SCRIPT = """
import os, threading
started, leave = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: (started.set(), leave.wait()))
thread.start(); started.wait()
import torch; torch.ones(1)
print(sorted(os.sched_getaffinity(thread.native_id)), flush=True)
leave.set(); thread.join()
"""


def test_for_an_unmodified_script(tmp_path: Path) -> None:
    """`hydroslurm run --bind-numa` binds all threads when torch comes, one line says so, and the
    run's events tell it."""
    command = [sys.executable, "-m", "hydroslurm.cli", "run", "--bind-numa", "--"]
    environ = {**os.environ, "HYDROSLURM_RUN_DIR": str(tmp_path)}
    done = captured([*command, sys.executable, "-c", SCRIPT], env=environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("bound to NUMA node") == 1
    log = RunDir(tmp_path).rank_events(0)
    (told,) = [one for one in read_events(log) if one.kind is EventKind.NUMA_BOUND]
    assert told.data["message"] in done.stderr
    cpus = parse_list(told.data["cpus"])
    assert json.loads(done.stdout) == sorted(cpus)
    assert cpus <= os.sched_getaffinity(0)
