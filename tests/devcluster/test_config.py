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


@pytest.mark.parametrize("profile", ["pause", "requeue", "gang-requeue"])
def test_everything_is_loopback_private_and_in_the_folder(profile: str) -> None:
    """Every address is the loopback's, every path is below the cluster's own folder."""
    spec = ClusterSpec(nodes=2, cpus_per_node=3, profile=profile)  # type: ignore[arg-type]
    settings = _settings(slurm_conf(spec, PLACE, PORTS))
    assert settings["SlurmctldHost"] == "SlurmctldHost=host7(127.0.0.1)"
    assert settings["SlurmctldPort"] == "SlurmctldPort=5001"
    assert settings["AccountingStorageHost"] == "AccountingStorageHost=127.0.0.1"
    assert settings["AuthInfo"] == "AuthInfo=socket=/t/x/c/run/munge.sock,cred_expire=5"
    assert settings["SlurmUser"] == "SlurmUser=ada"
    for name, port in (("n1", 5003), ("n2", 5004)):
        assert settings[f"NodeName={name}"] == (
            f"NodeName={name} NodeHostname=host7 NodeAddr=127.0.0.1 Port={port} CPUs=3 "
            "RealMemory=2048 State=UNKNOWN"
        )
    for line in settings.values():
        for word in line.partition("=")[2].replace("socket=", "").split(","):
            assert not word.startswith("/") or word.startswith(("/t/x/c/", "/bin/true"))


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
    [("a-b_1", "a-b_1"), ("a.b.c", "a"), ("(none)", "localhost"), ("", "localhost")],
)
def test_an_odd_hostname_does_no_harm(hostname: str, host: str) -> None:
    """A name that slurm.conf could not hold becomes localhost, which Slurm replaces by its own."""
    place = Place(base=Path("/t"), hostname=hostname, user="ada", memory_mb=1)
    text = slurm_conf(ClusterSpec(nodes=2), place, PORTS)
    assert f"SlurmctldHost={host}(127.0.0.1)\n" in text


def test_the_plugin_is_optional_or_its_absence_explained() -> None:
    """srun goes on without a plugin that has gone; why there is none is a comment."""
    assert plugstack_conf(Path("/t/p.so")).splitlines()[-1] == "optional /t/p.so"
    without = plugstack_conf(None, "no header\nat all").splitlines()
    assert without[-2:] == ["# no --preempt: no header", "# no --preempt: at all"]
    assert all(line.startswith("#") for line in without)


def test_slurmdbd_reaches_its_database_by_socket_only() -> None:
    """No password, no port of a database, its own port on the loopback interface."""
    settings = _settings(slurmdbd_conf(ClusterSpec(), PLACE, PORTS))
    assert settings["DbdAddr"] == "DbdAddr=127.0.0.1"
    assert settings["DbdPort"] == "DbdPort=5002"
    assert settings["StorageHost"] == "StorageHost=localhost"
    assert not {"StoragePort", "StoragePass"} & settings.keys()


@pytest.mark.parametrize(
    ("release", "plugin"), [((22, 5), "cgroup/v1"), ((23, 2), "cgroup/v1"), ((25, 11), "disabled")]
)
def test_no_cgroup_file_system_is_needed(release: tuple[int, int], plugin: str) -> None:
    """slurmd is given a cgroup plugin that starts in a container without cgroups."""
    assert f"CgroupPlugin={plugin}\n" in cgroup_conf(ClusterSpec(), release)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nodes": 0}, "nodes is 0; it must be a whole number from 1 to 64"),
        ({"nodes": True}, "nodes is True"),
        ({"cpus_per_node": 1.5}, "cpus_per_node is 1.5"),
        ({"profile": "kill"}, "profile is 'kill'; it must be one of pause, requeue, gang-requeue"),
        ({"kill_wait_s": 0}, "kill_wait_s is 0"),
        ({"grace_s": -1}, "grace_s is -1"),
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
        request = Request(spec, odd, True, False, "/bin", me)
        assert Request.from_json(to_json(request)) == request
        running = Running(spec, True, False, odd, me, (("slurmctld", me),))
        running.write(Layout(tmp_path))
        assert Running.read(Layout(tmp_path)) == running
