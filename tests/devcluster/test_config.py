"""The text of the configuration files; what a ClusterSpec refuses, and that it travels."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydroslurm.devcluster import ClusterSpec
from hydroslurm.devcluster.config import (
    Place,
    Ports,
    cgroup_conf,
    plugstack_conf,
    slurm_conf,
    slurmdbd_conf,
)
from hydroslurm.devcluster.layout import Layout
from hydroslurm.devcluster.processes import ProcessId, Request, Running, to_json
from hydroslurm.devcluster.programs import Programs
from hydroslurm.errors import UsageError

PLACE = Place(base=Path("/t/x/c"), hostname="host7.example.org", user="ada", memory_mb=2048)
PORTS = Ports(slurmctld=5001, slurmdbd=5002, slurmd=(5003, 5004))


def _settings(text: str) -> dict[str, str]:
    """The lines of a configuration by their first word; partitions and nodes by their names."""
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {
        row.split()[0] if row.startswith(("Partition", "Node")) else row.partition("=")[0]: row
        for row in rows
    }


def test_a_slurm_of_its_own_prefix_brings_its_plugins(tmp_path: Path) -> None:
    """As setup.sh unpacks one for a user without root; the setting has no blank, as Slurm wants."""
    slurm = tmp_path / "a b"
    (slurm / "sbin").mkdir(parents=True)
    (slurm / "lib/slurm").mkdir(parents=True)
    (tmp_path / "slurmctld").symlink_to(slurm / "sbin/slurmctld")
    plugins = Programs({"slurmctld": str(tmp_path / "slurmctld")}, "cc", "").plugins
    assert plugins == slurm / "lib/slurm"
    place = replace(PLACE, plugins=plugins)
    for text in (
        slurm_conf(ClusterSpec(nodes=2), place, PORTS),
        slurmdbd_conf(ClusterSpec(), place, PORTS),
    ):
        assert _settings(text)["PluginDir"] == "PluginDir=/t/x/c/run/plugins"


GANG = "SUSPEND,GANG"
SHARED = "OverSubscribe=FORCE:1 "


@pytest.mark.parametrize(
    ("profile", "mode", "low", "urgent"),
    [
        ("pause", GANG, f"{SHARED}PreemptMode=SUSPEND", SHARED),
        ("requeue", "REQUEUE", "PreemptMode=REQUEUE GraceTime=9", ""),
        ("gang-requeue", GANG, f"{SHARED}PreemptMode=REQUEUE GraceTime=9", SHARED),
    ],
)
def test_profiles(profile: str, mode: str, low: str, urgent: str) -> None:
    """Gang scheduling between the partitions, one job at a time within each; or requeues after the
    grace of the spec. The first line of each file warns whoever opens it."""
    spec = ClusterSpec(nodes=2, profile=profile, grace_s=9, kill_wait_s=6)  # type: ignore[arg-type]
    text = slurm_conf(spec, PLACE, PORTS)
    settings = _settings(text)
    assert settings["PreemptMode"] == f"PreemptMode={mode}"
    assert settings["KillWait"] == "KillWait=6"
    assert settings["PartitionName=low"].endswith(f"PriorityTier=1 {low}")
    assert settings["PartitionName=urgent"].endswith(f"PriorityTier=10 {urgent}PreemptMode=OFF")
    assert "Default=YES" in settings["PartitionName=low"]
    for line in (settings["PartitionName=low"], settings["PartitionName=urgent"]):
        assert "Nodes=n1,n2" in line
    for made in (text, slurmdbd_conf(ClusterSpec(), PLACE, PORTS), plugstack_conf(None, "a\nb")):
        assert made.startswith("# FOR TRYING AND TESTING ONLY, NOT FOR PRODUCTION")


@pytest.mark.parametrize(
    ("hostname", "host"),
    [("a-b_1", "a-b_1"), ("(none)", "localhost"), ("", "localhost")],
)
def test_an_odd_hostname_does_no_harm(hostname: str, host: str) -> None:
    """A name that slurm.conf could not hold becomes localhost, which Slurm replaces by its own."""
    place = Place(base=Path("/t"), hostname=hostname, user="ada", memory_mb=1)
    text = slurm_conf(ClusterSpec(nodes=2), place, PORTS)
    assert f"SlurmctldHost={host}(127.0.0.1)\n" in text


@pytest.mark.parametrize(("release", "plugin"), [((22, 5), "cgroup/v1"), ((25, 11), "disabled")])
def test_no_cgroup_file_system_is_needed(release: tuple[int, int], plugin: str) -> None:
    """slurmd is given a cgroup plugin that starts in a container without cgroups."""
    assert f"CgroupPlugin={plugin}\n" in cgroup_conf(ClusterSpec(), release)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 0}, "nodes is 0; it must be a whole number from 1 to 64"),
        ({"cpus_per_node": True}, "cpus_per_node is True"),
        ({"profile": "kill"}, "profile is 'kill'; it must be one of pause, requeue, gang-requeue"),
        ({"constrain_memory": True}, "constrain_memory needs cgroups"),
    ],
)
def test_a_wrong_value_is_refused_with_the_right_ones(values: dict[str, Any], words: str) -> None:
    """A spec is checked when it is made, and the message names what would do."""
    with pytest.raises(UsageError, match=words):
        ClusterSpec(**values)


def test_spec_survives_json(tmp_path: Path) -> None:
    """What is written down is read back as the same value, with a name that is no text, too."""
    odd = Path(os.fsdecode(b"/a b/\xff"))
    me = ProcessId(1, 2)
    for spec in (
        ClusterSpec(nodes=2, profile="requeue", directory=odd, grace_s=7),
        ClusterSpec(),
    ):
        request = Request(spec, True, False, me)
        assert Request.from_json(to_json(request)) == request
        running = Running(spec, False, odd, me, (("slurmctld", me),), "no headers")
        running.write(Layout(tmp_path))
        assert Running.read(Layout(tmp_path)) == running
