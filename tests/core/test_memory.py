"""How much memory may be taken, read from recorded trees of /proc and /sys."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hydroslurm.core import memory

MB = 10**6
V1_MOUNT = "36 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2_MOUNT = "41 31 0:38 {top} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
STEP = "slurm_n1/uid_0/job_7/step_0"


def machine(root: Path, *, total_mb: int = 64_000, available_mb: int = 60_000) -> Path:
    """/proc of a process of 100 MB."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {total_mb * 1000000 // 1024} kB\nMemFree:         1024 kB\n"
        f"MemAvailable:   {available_mb * 1000000 // 1024} kB\nHugePages_Total:       0\n"
    )
    (root / "proc/self/status").write_text("Name:\tpython\nVmHWM:\t97656 kB\nVmRSS:\t97656 kB\n")
    return root


def in_v1(root: Path, path: str, *, top: str = "/") -> Path:
    """The process is in a cgroup of v1, as Slurm's task/cgroup makes them."""
    (root / "proc/self/cgroup").write_text(
        f"6:freezer:/slurm_n1/uid_0/job_7/step_0\n4:cpu,memory:{path}\n1:name=systemd:/\n0::/\n"
    )
    (root / "proc/self/mountinfo").write_text(
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
        + V1_MOUNT.format(top=top).replace("rw,memory", "rw,cpu,memory")
        + "40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n"
        + V2_MOUNT.format(top="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    )
    return root / "sys/fs/cgroup/memory"


def in_v2(root: Path, path: str) -> Path:
    """The process is in a cgroup of v2."""
    (root / "proc/self/cgroup").write_text(f"0::{path}\n")
    (root / "proc/self/mountinfo").write_text(V2_MOUNT.format(top="/"))
    return root / "sys/fs/cgroup"


def v1(folder: Path, *, limit_mb: float, used_mb: int, cache_mb: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    limit = 9223372036854771712 if math.isinf(limit_mb) else int(limit_mb * MB)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used_mb * MB}\n")
    (folder / "memory.stat").write_text(
        f"cache 5\ninactive_file 7\ntotal_cache 9\ntotal_inactive_file {cache_mb * MB // 2}\n"
        f"total_active_file {cache_mb * MB // 2}\n"
    )


def v2(folder: Path, *, limit: str, used_mb: int, cache_mb: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used_mb * MB}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache_mb * MB}\nactive_file 0\n")


def test_the_limit_of_a_job_counts_from_inside_its_steps(tmp_path: Path) -> None:
    """v1: the job has the limit, the process is two levels below. A tenth stays free, and page
    cache that can be dropped is not counted as used."""
    top = in_v1(machine(tmp_path), f"/{STEP}/task_0")
    v1(top / STEP / "task_0", limit_mb=math.inf, used_mb=300)
    v1(top / STEP, limit_mb=1000, used_mb=300)
    v1(top / "slurm_n1/uid_0/job_7", limit_mb=1000, used_mb=700, cache_mb=200)
    v1(top / "slurm_n1", limit_mb=math.inf, used_mb=700)
    room = memory.room(root=tmp_path)
    assert room.free_bytes == (900 - 500) * MB
    assert (room.limit_bytes, room.used_bytes) == (1000 * MB, 500 * MB)
    assert room.message.startswith("500 of 1,000 MB of the limit in ")
    assert room.message.endswith("slurm_n1/uid_0/job_7 are in use")


def test_v2_knows_max_and_none(tmp_path: Path) -> None:
    """v2: "max" is no limit; that of a folder above counts."""
    top = in_v2(machine(tmp_path), "/system.slice/job_7/step_0")
    v2(top / "system.slice/job_7/step_0", limit="max", used_mb=100)
    v2(top / "system.slice/job_7", limit=str(2000 * MB), used_mb=900, cache_mb=100)
    assert memory.room(root=tmp_path).free_bytes == 1000 * MB


def test_in_a_container_the_mount_shows_its_own_cgroup(tmp_path: Path) -> None:
    """The path in /proc/self/cgroup begins with what is mounted, or is not below it at all."""
    machine(tmp_path)
    for path in ("/docker/abc", "/elsewhere"):
        v1(in_v1(tmp_path, path, top="/docker/abc"), limit_mb=1000, used_mb=400)
        assert memory.room(root=tmp_path).free_bytes == 500 * MB


def test_without_a_limit_the_machine_is_the_bound(tmp_path: Path) -> None:
    """What is available of it, less a tenth of all; where /proc tells nothing there is no bound."""
    top = in_v1(machine(tmp_path / "a", total_mb=10_000, available_mb=6_000), "/")
    v1(top, limit_mb=math.inf, used_mb=9_000)
    room = memory.room(root=tmp_path / "a")
    assert room.free_bytes == pytest.approx(5_000 * MB, abs=4096)
    assert room.bound == "this machine"
    assert memory.room(root=tmp_path / "none").free_bytes > 2**50


def test_ranks_of_a_node_share_what_is_left(tmp_path: Path) -> None:
    """Each may take its part, and what is more than used up is nothing. A process that is below its
    peak between two steps will be there again."""
    top = in_v1(machine(tmp_path), "/job")
    v1(top / "job", limit_mb=1000, used_mb=500)
    assert memory.room(ranks_here=4, root=tmp_path).free_bytes == 100 * MB
    status = tmp_path / "proc/self/status"
    status.write_text(status.read_text().replace("VmHWM:\t97656", "VmHWM:\t244140"))
    assert memory.room(root=tmp_path).free_bytes == pytest.approx(250 * MB, abs=4096)
    v1(top / "job", limit_mb=1000, used_mb=950)
    assert memory.room(ranks_here=4, root=tmp_path).free_bytes == 0
