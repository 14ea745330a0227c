"""Autoscaling: its rules, on traces, and in a coordinator."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from elasticstory import formed

from hydroslurm.coordination.authentication import pack
from hydroslurm.elastic.autoscale import (
    AutoscalePolicy,
    Autoscaler,
    Behavior,
    Decision,
    Observation,
    Usage,
    decide,
)
from hydroslurm.elastic.coordinator import EVENTS, MOST_RANKS, Coordinator, restored
from hydroslurm.elastic.folder import ElasticFolder
from hydroslurm.elastic.roster import Size
from hydroslurm.errors import UsageError

EVERY_S = 30.0
PROMPT = Behavior(stabilization_window_s=0, cooldown_s=0, step=64)


def simulate(
    policy: AutoscalePolicy,
    world: Callable[[float, int], dict[str, Any]],
    *,
    hours: float,
    size: int,
    least: int = 1,
    most: int = 32,
) -> list[tuple[float, Decision]]:
    """The decisions over a trace, obeyed at once; ``world``: what is seen at a time and size."""
    history: list[Observation] = []
    decisions = []
    for tick in range(int(hours * 3600 / EVERY_S)):
        now_s = tick * EVERY_S
        history.append(Observation(moment_s=now_s, size=size, wanted=size, **world(now_s, size)))
        history = [one for one in history if one.moment_s >= now_s - policy.history_s]
        decision = decide(policy, Size(min=least, max=most, wanted=size), history)
        decisions.append((now_s, decision))
        size = decision.size
    return decisions


def changes(decisions: list[tuple[float, Decision]], size: int) -> list[tuple[float, int]]:
    """When the size changed, and to what."""
    found = []
    for now_s, decision in decisions:
        if decision.size != size:
            size = decision.size
            found.append((now_s, size))
    return found


def test_a_day_of_other_jobs_is_followed_with_few_changes() -> None:
    """The run gives nodes back while others wait for them, and takes them again at night."""
    policy = AutoscalePolicy(queue_length=0)

    def cluster(now_s: float, size: int) -> dict[str, Any]:
        free = round(17 + 15 * math.cos(now_s / 86400 * 2 * math.pi))
        return {"pending_jobs": max(0, size - free)}

    decisions = simulate(policy, cluster, hours=24, size=2, least=2)
    sizes = [decision.size for _, decision in decisions]
    assert max(sizes) == 32
    assert min(sizes[1000:1600]) <= 4  # at noon, when others have the nodes
    for now_s, decision in decisions:
        free = round(17 + 15 * math.cos(now_s / 86400 * 2 * math.pi))
        assert decision.size <= max(2, free + 5)  # the window, after a falling cluster


@pytest.mark.parametrize("period", [1, 2])
def test_a_flapping_queue_moves_nothing(period: int) -> None:
    """Jobs that wait for a moment only are no reason to give nodes back and take them again."""

    def cluster(now_s: float, _: int) -> dict[str, Any]:
        return {"pending_jobs": 4 * (int(now_s / EVERY_S) // period % 2)}

    calm = simulate(AutoscalePolicy(queue_length=0), cluster, hours=4, size=4, most=4)
    assert changes(calm, 4) == []
    prompt = AutoscalePolicy(queue_length=0, scale_up=PROMPT, scale_down=PROMPT)
    assert len(changes(simulate(prompt, cluster, hours=4, size=4, most=4), 4)) > 100


def test_a_target_is_tracked() -> None:
    """A step of a fixed amount of work comes to its target, and stays within the tolerance."""
    policy = AutoscalePolicy(step_time_s=1.0)
    decisions = simulate(policy, lambda _, size: {"step_s": 16 / size}, hours=2, size=4)
    assert decisions[-1][1].size in (15, 16, 17)
    assert len(changes(decisions, 4)) <= 5
    down = simulate(policy, lambda _, size: {"step_s": 4 / size}, hours=2, size=32)
    assert down[-1][1].size == 4


@pytest.mark.parametrize(
    ("seen", "size", "reason"),
    [
        ({"cpu": 0.6}, 8, "cpu 0.6, target 0.3: 8 members"),
        ({"cpu": 0.6, "memory": 0.9}, 8, "cpu 0.6, target 0.3: 8 members"),
        ({"cpu": 0.31, "memory": 0.8}, 4, "memory 0.8 meets its target 0.8"),
        ({"cpu": 0.9}, 10, "cpu 0.9, target 0.3: 12 members, within elastic.min and max: 10"),
        ({"cpu": 0.01, "memory": 0.01}, 2, "memory 0.01, target 0.8: 1 members, within"),
        ({"cpu": 0.6, "pending_jobs": 3}, 3, "3 jobs wait, 2 may"),
    ],
)
def test_the_largest_request_wins_and_bounds_and_queue_lower_it(
    seen: dict[str, Any], size: int, reason: str
) -> None:
    """The reason names the metric, its value and what set the size."""
    rules = {"cpu": 0.3, "memory": 0.8, "queue_length": 2}
    policy = AutoscalePolicy(**rules, scale_up=PROMPT, scale_down=PROMPT)
    observed = Observation(moment_s=0.0, size=4, wanted=4, **{"memory": 0.8, **seen})
    decision = decide(policy, Size(min=2, max=10, wanted=4), [observed])
    assert decision.size == size
    assert decision.reason.startswith(reason)


def test_a_metric_that_is_not_known_holds_the_size() -> None:
    """No observation of a target is no reason to go down, nor to go up."""
    policy = AutoscalePolicy(cpu=0.7, gpu=0.9)
    decisions = simulate(policy, lambda *_: {"cpu": 0.1, "gpu": None}, hours=1, size=4)
    assert changes(decisions, 4) == []
    assert "gpu is not known" in decisions[-1][1].reason


def test_a_step_and_a_cooldown_bound_each_change() -> None:
    """The size never moves by more than a step, nor sooner than the cooldown after the last."""
    behavior = Behavior(stabilization_window_s=60, cooldown_s=300, step=3)
    policy = AutoscalePolicy(scale_up=behavior)
    found = changes(simulate(policy, lambda *_: {}, hours=1, size=1), 1)
    assert [size for _, size in found[:3]] == [4, 7, 10]
    assert found[0][0] == 60
    assert all(after[0] - before[0] >= 300 for before, after in itertools.pairwise(found))


# --- in a coordinator: what it sees and does; and files that fill the disk

POLICY = AutoscalePolicy(step_time_s=1.0, scale_up=PROMPT)


def started(tmp_path: Path, policy: AutoscalePolicy) -> tuple[ElasticFolder, Coordinator]:
    folder = ElasticFolder(run=tmp_path)
    coordinator = formed(folder, "a", "b", size=Size(min=1, max=4, wanted=2), autoscale=policy)
    for name, step_s, use in (("a", 1.9, {"cpu": 0.4, "memory": 0.1}), ("b", 2.0, {"cpu": 0.6})):
        coordinator.beats[name, 0] = {"step_s": step_s, "samples_per_s": 50.0, "use": use}
    return folder, coordinator


def test_options_of_another_version_are_refused(tmp_path: Path) -> None:
    """They are named."""
    folder = ElasticFolder(run=tmp_path)
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
    what a dry run would do, which does nothing. A claim that a file server does not give ends
    nothing."""
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
    assert coordinator.membership.size.wanted == 2
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
