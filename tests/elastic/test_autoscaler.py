"""Autoscaling in a coordinator: what it sees and does; and files that fill the disk."""

from __future__ import annotations

import dataclasses
import errno
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from hydroslurm.coordination.frames import pack
from hydroslurm.elastic.autoscale import AutoscalePolicy, Behavior
from hydroslurm.elastic.autoscaler import Autoscaler
from hydroslurm.elastic.coordinator import EVENTS, MOST_RANKS, Coordinator, restored, start
from hydroslurm.elastic.folder import CoordinatorOptions, ElasticFolder
from hydroslurm.elastic.roster import Size
from hydroslurm.elastic.usage import Usage
from hydroslurm.errors import UsageError

PROMPT = Behavior(stabilization_window_s=0, cooldown_s=0, step=4)
POLICY = AutoscalePolicy(step_time_s=1.0, scale_up=PROMPT)


def started(tmp_path: Path, policy: AutoscalePolicy) -> tuple[ElasticFolder, Coordinator]:
    folder = ElasticFolder(run=tmp_path)
    options = CoordinatorOptions(
        host="127.0.0.1", size=Size(min=1, max=4, wanted=2), autoscale=policy
    )
    folder.write_options(options)
    coordinator = start(folder)
    for name in ("a", "b"):
        rank, now_s = (name, 0), time.monotonic()
        membership = coordinator.membership
        coordinator.act(
            membership.join(rank, local_size=1, node=name, generation=0, holding=False, now_s=now_s)
        )
        coordinator.act(membership.ready(rank, now_s))
    assert membership.change is not None
    for name in ("a", "b"):
        coordinator.act(membership.formed((name, 0), membership.change.number, True, 0.0, now_s))
        if membership.change is None:
            break
    for name, step_s, use in (("a", 1.9, {"cpu": 0.4, "memory": 0.1}), ("b", 2.0, {"cpu": 0.6})):
        beat = {"step_s": step_s, "samples_per_s": 50.0, "use": use}
        coordinator.beats[name, 0] = beat
    return folder, coordinator


def test_options_come_back_as_they_were_written(tmp_path: Path) -> None:
    """What is submitted is what the coordinator and the members read; what another version has
    written is refused."""
    folder, size = ElasticFolder(run=tmp_path), Size(min=1, max=4, wanted=2)
    for rules in (
        {"autoscale": POLICY},
        {"batch": "per_rank", "lr": "sqrt", "lr_warmup_steps": 7},
        {"summation": "fixed_order"},
        {"averaging_every": 8},
    ):
        options = CoordinatorOptions(size=size, **rules)  # type: ignore[arg-type]
        folder.write_options(options)
        assert folder.options() == options
    for wrong in ({"rings": 1}, {"batch": 7}, {"size": {"min": 3, "max": 2}}):
        folder.write(folder.options_json, wrong)
        with pytest.raises(UsageError, match=rf"options of an elastic run: .*{next(iter(wrong))}"):
            folder.options()


def test_the_coordinator_scales_and_its_successor_knows(tmp_path: Path) -> None:
    """The size follows what is observed, and the ledger says by what."""
    folder, coordinator = started(tmp_path, POLICY)
    try:
        assert coordinator.membership.state == "Running"
        seen = Autoscaler(folder, POLICY, coordinator).observe(0.0)
        assert (seen.size, seen.wanted, seen.step_s) == (2, 2, 2.0)
        assert (seen.cpu, seen.memory, seen.gpu) == (0.5, 0.1, None)
        (tick,) = coordinator.on_tick
        tick(time.monotonic())
        assert coordinator.membership.size.wanted == 4
        wanted = [one for one in folder.ledger() if one["kind"] == "wanted"]
        assert [(one["size"], one["by"]) for one in wanted] == [
            (4, "autoscaler: step_s 2, target 1: 4 members")
        ]
        assert restored(folder, folder.options(), 0.0)[0].size.wanted == 4
        coordinator.beats["a", 0]["step_s"] = 9.0
        tick(time.monotonic())  # within the half minute
        assert len([one for one in folder.ledger() if one["kind"] == "wanted"]) == 1
    finally:
        coordinator.close()


def test_a_dry_run_says_what_it_would_have_done(tmp_path: Path) -> None:
    """The size stays; the ledger names what it would have been."""
    folder, coordinator = started(tmp_path, dataclasses.replace(POLICY, dry_run=True))
    try:
        Autoscaler(folder, dataclasses.replace(POLICY, dry_run=True), coordinator).tick(0.0)
        assert coordinator.membership.size.wanted == 2
        assert [one["size"] for one in folder.ledger() if one["kind"] == "dry_run"] == [4]
    finally:
        coordinator.close()


def test_the_use_of_a_node_is_read_from_the_kernel(tmp_path: Path) -> None:
    """CPUs between two readings; memory of the node or of the job's cgroup, above those of its step
    and task, which have no limit. Files fill the page cache up to the limit, and are no use of
    memory, however often they are read."""
    number = min(os.sched_getaffinity(0))
    task = tmp_path / "sys/fs/cgroup/job_7/step_0/task_0"
    for folder in (tmp_path / "proc/self", task):
        folder.mkdir(parents=True)
    stat = tmp_path / "proc/stat"
    stat.write_text(f"cpu  0 0 0 0\ncpu{number} 100 0 0 100 0 0 0 0 0 0\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 750 kB\n")
    usage = Usage(tmp_path)
    assert usage.read() == {"memory": 0.25}
    stat.write_text(f"cpu  0 0 0 0\ncpu{number} 160 0 0 120 20 0 0 0 0 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job_7/step_0/task_0\n")
    mount = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(mount)
    for folder, limit in ((task, "max"), (task.parent, "max"), (task.parents[1], "2000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("1900\n")
        (folder / "memory.stat").write_text("anon 300\ninactive_file 1000\nactive_file 500\n")
    assert usage.read() == {"cpu": 0.6, "memory": 0.2}
    assert 0 < Usage().read()["memory"] < 1


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status that cannot be written is said once, and written when there is room again; so is
    what a dry run would do. A claim that a file server does not give ends nothing."""
    folder, coordinator = started(tmp_path, dataclasses.replace(POLICY, dry_run=True))
    written: list[Path] = []

    def full(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write(path: Path, _: object) -> None:
        written.append(path)
        if len(written) < 3:
            full()

    monkeypatch.setattr(type(folder), "write", lambda _, path, document: write(path, document))
    (tick,) = coordinator.on_tick
    try:
        with monkeypatch.context() as broken:
            broken.setattr(type(folder), "record", full)
            broken.setattr(coordinator._fence, "_read", full)
            coordinator.on_round()
        assert written == []
        tick(time.monotonic() + 100)
        for _ in range(3):
            coordinator._status_due_s = 0.0
            coordinator.on_round()
    finally:
        coordinator.close()
    assert written == [folder.status_json] * 3
    assert capsys.readouterr().err.count("the status cannot be written") == 1
    assert [one["size"] for one in folder.ledger() if one["kind"] == "dry_run"] == [4]


def test_a_change_waits_for_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is neither made without being written down, nor given up; that is said once."""
    folder, coordinator = started(tmp_path, POLICY)
    record, waited_s = type(folder).record, []

    def full(*change: Any) -> None:
        if len(waited_s) < 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        record(*change)

    monkeypatch.setattr(type(folder), "record", full)
    monkeypatch.setattr("time.sleep", waited_s.append)
    try:
        coordinator.act(coordinator.membership.scale(3, (), time.monotonic(), by="me"))
    finally:
        coordinator.close()
    assert [one["size"] for one in folder.ledger() if one["kind"] == "wanted"] == [3]
    assert capsys.readouterr().err.count("No space left") == 1


def test_a_fault_of_the_coordinators_own_is_no_failure_of_a_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the connection of the rank whose message it was, which is said by what it was."""
    folder, coordinator = started(tmp_path, POLICY)
    peer = Mock()
    coordinator._peers["a", 0], coordinator._ranks[peer] = peer, ("a", 0)
    monkeypatch.setitem(EVENTS, "leave", lambda *_, **__: int("x"))
    monkeypatch.setattr(coordinator, "drop", coordinator.on_drop)
    try:
        coordinator._guarded(peer, coordinator.on_body, peer, pack({"type": "leave", "reason": ""}))
    finally:
        coordinator.close()
    (gone,) = (one for one in folder.ledger() if one["kind"] in ("left", "failure"))
    assert (gone["kind"], gone["member"]) == ("left", "a")
    assert gone["reason"].startswith("a fault of the coordinator's own: ValueError: invalid")
    assert "Traceback" in capsys.readouterr().err


def test_the_status_of_many_members_is_read(tmp_path: Path) -> None:
    """Of as many as a run may have, each of which leaves for a reason."""
    folder, coordinator = started(tmp_path, POLICY)
    coordinator.close()
    member = coordinator.membership.members["a"]
    member.leaving = "x" * 16384
    coordinator.membership.members |= dict.fromkeys(map(str, range(MOST_RANKS - 2)), member)
    coordinator._write_status()
    status = folder.read(folder.status_json)
    assert status is not None
    assert len(status["members"]) == MOST_RANKS
