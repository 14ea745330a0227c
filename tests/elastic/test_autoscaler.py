"""Autoscaling in a coordinator: what it sees, records and does."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hydroslurm.cli import app
from hydroslurm.elastic.autoscale_rules import AutoscalePolicy, Behavior
from hydroslurm.elastic.autoscaler import Autoscaler, read_observations
from hydroslurm.elastic.coordinator import Coordinator, restored, start
from hydroslurm.elastic.folder import CoordinatorOptions, ElasticFolder
from hydroslurm.elastic.roster import Size
from hydroslurm.elastic.usage import Usage
from hydroslurm.errors import UnreadableOutput
from hydroslurm.slurm.listings import read_load
from hydroslurm.slurm.values import PartitionLoad

PROMPT = Behavior(stabilization_window_s=0, cooldown_s=0, step=4)
POLICY = AutoscalePolicy(min=1, max=4, step_time_s=1.0, scale_up=PROMPT)


def started(tmp_path: Path, policy: AutoscalePolicy) -> tuple[ElasticFolder, Coordinator]:
    folder = ElasticFolder(run=tmp_path)
    options = CoordinatorOptions(
        host="127.0.0.1", size=Size(min=1, max=4, wanted=2), autoscale=policy
    )
    folder.write(folder.options_json, options.to_json())
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
    coordinator._paces = {("a", 0): (1.9, 50.0), ("b", 0): (2.0, 50.0)}
    coordinator.uses = {("a", 0): {"cpu": 0.4, "memory": 0.1}, ("b", 0): {"cpu": 0.6}}
    return folder, coordinator


def test_the_options_carry_the_rules(tmp_path: Path) -> None:
    """What is submitted is what the coordinator reads."""
    folder = ElasticFolder(run=tmp_path)
    options = CoordinatorOptions(size=Size(min=1, max=4, wanted=2), autoscale=POLICY)
    folder.write(folder.options_json, options.to_json())
    assert folder.options() == options


def test_the_coordinator_scales_and_its_successor_knows(tmp_path: Path) -> None:
    """An observation is recorded, the size follows, and the ledger says by what."""
    folder, coordinator = started(tmp_path, POLICY)
    try:
        assert coordinator.membership.state == "Running"
        (tick,) = coordinator.on_tick
        tick(time.monotonic())
        (seen,) = read_observations(folder)
        assert (seen.size, seen.wanted, seen.step_s, seen.samples_per_s) == (2, 2, 2.0, 100.0)
        assert (seen.cpu, seen.memory, seen.gpu) == (0.5, 0.1, None)
        assert coordinator.membership.size.wanted == 4
        wanted = [one for one in folder.ledger() if one["kind"] == "wanted"]
        assert [(one["size"], one["by"]) for one in wanted] == [
            (4, "autoscaler: step_s 2, target 1: 4 members")
        ]
        assert restored(folder, folder.options(), 0.0)[0].size.wanted == 4
        tick(time.monotonic())  # within the half minute
        assert len(read_observations(folder)) == 1
    finally:
        coordinator.close()


def test_a_dry_run_says_what_it_would_have_done(tmp_path: Path) -> None:
    """The size stays; the ledger and the command line name size and reason."""
    folder, coordinator = started(tmp_path, dataclasses.replace(POLICY, dry_run=True))
    try:
        Autoscaler(folder, dataclasses.replace(POLICY, dry_run=True), coordinator).tick(0.0)
        assert coordinator.membership.size.wanted == 2
        assert [one["size"] for one in folder.ledger() if one["kind"] == "dry_run"] == [4]
    finally:
        coordinator.close()
    with folder.observations_jsonl.open("a") as file:
        file.write('{"epoch_s": 1.0, "size": "many"}\n{"torn')
    result = CliRunner().invoke(app, ["autoscale", str(tmp_path)])
    assert "2 -> 4  step_s 2, target 1: 4 members" in result.output, result.output


def test_the_use_of_a_node_is_read_from_the_kernel(tmp_path: Path) -> None:
    """CPUs between two readings; memory of the cgroup where it has a limit, else of the node."""
    import os

    number = min(os.sched_getaffinity(0))
    for name in ("proc/self", "sys/fs/cgroup/job"):
        (tmp_path / name).mkdir(parents=True)
    stat = tmp_path / "proc/stat"
    stat.write_text(f"cpu  0 0 0 0\ncpu{number} 100 0 0 100 0 0 0 0 0 0\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 750 kB\n")
    usage = Usage(tmp_path)
    assert usage.read() == {"memory": 0.25}
    stat.write_text(f"cpu  0 0 0 0\ncpu{number} 160 0 0 120 20 0 0 0 0 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("2000\n")
    (tmp_path / "sys/fs/cgroup/job/memory.current").write_text("1500\n")
    assert usage.read() == {"cpu": 0.6, "memory": 0.75}
    assert 0 < Usage().read()["memory"] < 1


def test_the_load_of_a_partition_is_read() -> None:
    """Jobs of others that wait, and idle nodes in all of sinfo's lines."""
    assert read_load("ann\nbob\nbob\n", "2\n3\n", without_user="ann") == PartitionLoad(
        pending_jobs=2, idle_nodes=5
    )
    with pytest.raises(UnreadableOutput, match="numbers of nodes"):
        read_load("", "n/a\n", without_user="ann")


def test_options_with_rules_are_json(tmp_path: Path) -> None:
    """Nothing in the rules is beyond JSON."""
    text = json.dumps(CoordinatorOptions(size=Size(max=4), autoscale=POLICY).to_json())
    assert CoordinatorOptions.from_json(json.loads(text)).autoscale == POLICY
