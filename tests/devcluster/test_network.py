"""The network of a cluster's nodes: it works, it is that cluster's, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from clusters import require_network
from processes import wait_until

from hydroslurm.devcluster import ClusterSpec, DevCluster, network
from hydroslurm.devcluster.cluster import end_cluster
from hydroslurm.errors import ClusterError

pytestmark = pytest.mark.slurm
HEAR = """
import socket
with socket.create_server(("", 5555)) as server:
    print("listens", flush=True)
    server.accept()[0].sendall(socket.gethostname().encode())
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5555), timeout=5) as connection:
    print(connection.recv(99).decode())
"""


def interfaces() -> set[str]:
    listed = subprocess.run(["ip", "-j", "link"], capture_output=True, text=True, check=True)
    return {row["ifname"] for row in json.loads(listed.stdout)}


def left_of(spec: ClusterSpec) -> set[str]:
    """Its bridge, cables and namespaces that are there."""
    spaces = subprocess.run(["ip", "-j", "netns"], capture_output=True, text=True, check=True)
    named = {row["name"] for row in json.loads(spaces.stdout or "[]")}
    return {one for one in interfaces() | named if one.startswith(spec.bridge)}


def test_two_networks_at_once(tmp_path: Path) -> None:
    """Nodes reach each other by name, and nobody in the other cluster; `down` removes one network
    and leaves the other, which a killed supervisor leaves to `down` too."""
    require_network()
    specs = [ClusterSpec(nodes=2, directory=tmp_path / name, network=True) for name in "ab"]
    with DevCluster.up(specs[0]) as first, DevCluster.up(specs[1], detach=True) as second:
        assert len(left_of(first.spec)) == len(left_of(second.spec)) == 3
        step = ["srun", "--nodes=1", "--overlap", sys.executable, "-c"]
        hears = [*step[:2], "--nodelist=n1", *step[3:], HEAR]
        with subprocess.Popen(
            hears, env=first.child_environ(), stdout=subprocess.PIPE, text=True
        ) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listens\n"
            asks = [*step[:2], "--nodelist=n2", *step[3:], ASK]
            address = first.run(["scontrol", "show", "node", "-o", "n1"]).stdout
            (address,) = [w[9:] for w in address.split() if w.startswith("NodeAddr=")]
            stranger = second.run([*asks, address], check=False)
            assert stranger.returncode != 0, stranger.stdout
            assert first.run([*asks, "n1"]).stdout == "n1\n"
        first.down()
        assert left_of(first.spec) == set()
        supervisor = second._running.supervisor
        os.kill(supervisor.pid, signal.SIGKILL)
        wait_until(lambda: not supervisor.alive, "the supervisor's end")
        assert len(left_of(second.spec)) == 3
        assert end_cluster(specs[1].directory)
        assert left_of(second.spec) == set()


def test_a_network_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One clear error, before anything is started, and nothing is left."""
    require_network()
    spec = ClusterSpec(nodes=2, directory=tmp_path / "c", network=True)
    network.create(spec, "host", tmp_path / "hosts")
    try:
        with pytest.raises(ClusterError, match=r"\(RTNETLINK answers: File exists\), which needs"):
            network.create(spec, "host", tmp_path / "hosts")
    finally:
        network.remove(spec)
    assert left_of(spec) == set()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"No such file.*needs root"):
        network.create(spec, "host", tmp_path / "hosts")
