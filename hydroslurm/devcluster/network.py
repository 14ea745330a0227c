"""A network for the nodes of one dev cluster: a namespace each, joined by a bridge; needs root.

The host's end of each node's cable is what a test cuts or slows; the node's namespace has the same
name, and ``eth0`` in it. Everything is called after the cluster's folder.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import subprocess
from pathlib import Path

from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError

_ADDRESSES = ipaddress.IPv4Network("198.18.0.0/15")
"""Reserved for tests of networks (RFC 2544), and routed nowhere."""


def require(spec: ClusterSpec) -> None:
    """Make sure that this user can make namespaces.

    Raises:
        ClusterError: this is not root, or there is no program ``ip``.
    """
    if spec.network and (os.geteuid() != 0 or shutil.which("ip") is None):
        raise ClusterError(
            f"a network of the nodes' own needs root (this is user id {os.geteuid()}) and ip "
            "(Debian package iproute2). Leave out --network: the nodes then share the loopback "
            "interface"
        )


def create(spec: ClusterSpec) -> ipaddress.IPv4Network:
    """Make bridge, cables and namespaces; node N gets address N, the host the last but one.

    Raises:
        ClusterError: the kernel refuses; the message has its words.
    """
    bridge = spec.bridge
    _ip(f"link add {bridge} type bridge\nlink set {bridge} up")
    subnet = _claim_subnet(bridge)
    _ip(f"addr add {subnet[-2]}/24 dev {bridge} noprefixroute")
    for number, cable in enumerate(spec.cables, 1):
        _ip(
            f"netns add {cable}\nlink add {cable} type veth peer name eth0 netns {cable}\n"
            f"link set {cable} master {bridge} up"
        )
        _ip(f"addr add {subnet[number]}/24 dev eth0\nlink set eth0 up\nlink set lo up", "-n", cable)
    return subnet


def remove(spec: ClusterSpec) -> None:
    """Remove everything that :func:`create` has made; what is gone already is no error."""
    if spec.network:
        cables = "".join(f"link del {cable}\nnetns del {cable}\n" for cable in spec.cables)
        _ip(f"{cables}link del {spec.bridge}", "-force", check=False)


def enter(spec: ClusterSpec, number: int, hosts: Path) -> list[str]:
    """The beginning of a command that runs on a node: its network, host name and /etc/hosts."""
    script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
    inside = ["nsenter", f"--net=/run/netns/{spec.cables[number]}", "unshare", "--mount", "--uts"]
    return [*inside, "sh", "-c", script, "sh", spec.node_names[number], str(hosts)]


def _claim_subnet(bridge: str) -> ipaddress.IPv4Network:
    """Route to the bridge a subnet to which this machine has no route: the kernel gives the same
    route to one of two clusters only."""
    rows = json.loads(_ip("route", "-j", "-4"))
    taken = [ipaddress.ip_network(row["dst"]) for row in rows if row["dst"] != "default"]
    for subnet in _ADDRESSES.subnets(new_prefix=24):
        is_free = not any(map(subnet.overlaps, taken))
        if is_free and _ip(f"route add {subnet} dev {bridge}\nroute show {subnet}", check=False):
            return subnet
    raise ClusterError(f"no subnet of {_ADDRESSES} is free on this machine; see `ip route`")


def _ip(commands: str, *options: str, check: bool = True) -> str:
    done = subprocess.run(
        ["ip", *options, "-batch", "-"], input=commands, capture_output=True, text=True, check=False
    )
    if check and done.returncode != 0:
        raise ClusterError(f"the nodes' network cannot be made: {done.stderr.strip()}")
    return done.stdout
