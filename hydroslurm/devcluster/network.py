"""A network for the nodes of one dev cluster: a namespace each, joined by a bridge; needs root.

The host's end of each node's cable is what a test cuts or slows; the node's namespace has the same
name, and ``eth0`` in it. Names and addresses follow from the cluster's folder.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

from hydroslurm.devcluster.spec import ClusterSpec
from hydroslurm.errors import ClusterError


def create(spec: ClusterSpec, host: str, hosts: Path) -> None:
    """Make bridge, cables and namespaces, and the nodes' /etc/hosts with this machine as ``host``.

    Raises:
        ClusterError: they cannot be made; the message has the kernel's words.
    """
    control_at, *nodes_at = spec.addresses
    bridge = spec.bridge
    _ip(
        f"link add {bridge} type bridge\nlink set {bridge} up\n"
        # the route by itself: the kernel refuses it if another cluster has this subnet
        f"addr add {control_at}/24 dev {bridge} noprefixroute\nroute add {spec.subnet} dev {bridge}"
    )
    for cable, address in zip(spec.cables, nodes_at, strict=True):
        _ip(
            f"netns add {cable}\nlink add {cable} type veth peer name eth0 netns {cable}\n"
            f"link set {cable} master {bridge} up"
        )
        _ip(f"addr add {address}/24 dev eth0\nlink set eth0 up\nlink set lo up", "-n", cable)
    names = ["localhost", host, *spec.node_names]
    rows = zip(("127.0.0.1", *spec.addresses), names, strict=True)
    hosts.write_text("".join(f"{address} {name}\n" for address, name in rows))
    hosts.chmod(0o644)  # jobs of every user read it


def remove(spec: ClusterSpec) -> None:
    """Remove everything that :func:`create` created and that still exists."""
    if spec.network:
        cables = "".join(f"link del {cable}\nnetns del {cable}\n" for cable in spec.cables)
        with contextlib.suppress(ClusterError):
            _ip(f"{cables}link del {spec.bridge}", "-force")


def enter(spec: ClusterSpec, number: int, hosts: Path) -> list[str]:
    """Return the prefix of a command for a node: its network, host name and /etc/hosts."""
    script = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
    inside = ["nsenter", f"--net=/run/netns/{spec.cables[number]}", "unshare", "--mount", "--uts"]
    return [*inside, "sh", "-c", script, "sh", spec.node_names[number], str(hosts)]


def _ip(commands: str, *options: str) -> None:
    ip = ["ip", *options, "-batch", "-"]
    try:
        subprocess.run(ip, input=commands, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "").partition("\n")[0] or error
        raise ClusterError(
            f"the nodes' network cannot be made ({why}), which needs root and ip (Debian package "
            "iproute2). Leave out --network: the nodes then share the loopback interface"
        ) from error
