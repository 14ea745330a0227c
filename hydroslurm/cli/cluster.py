"""``hydroslurm cluster up | down | status | env``: a private Slurm, for trying and testing only."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, cast

import typer

from hydroslurm.cli.shared import AsJson

app = typer.Typer(
    no_args_is_help=True, help="Run a private Slurm on this machine, for trying and testing only."
)

Directory = Annotated[Path, typer.Option("--dir", help="The folder of the cluster.")]
DEFAULT_DIRECTORY = Path(".hydroslurm/cluster")


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="Number of nodes, each a slurmd.")] = 4,
    cpus: Annotated[int, typer.Option(help="CPUs per node.")] = 4,
    profile: Annotated[
        str,
        typer.Option(
            help="What happens to a preempted job in partition low: suspended (pause), requeued "
            "(requeue), or requeued by gang scheduling without grace time (gang-requeue)."
        ),
    ] = "pause",
    grace_s: Annotated[
        int, typer.Option("--grace", help="GraceTime of partition low, seconds; for requeue.")
    ] = 5,
    kill_wait_s: Annotated[int, typer.Option("--kill-wait", help="KillWait, seconds.")] = 30,
    proctrack: Annotated[
        str,
        typer.Option(
            help="How Slurm tracks the processes of a job step: linuxproc, or cgroup as in "
            "production (needs root and cgroup v1 controllers)."
        ),
    ] = "linuxproc",
    constrain_memory: Annotated[
        bool,
        typer.Option(
            "--constrain-memory",
            help="With cgroup: jobs request memory (--mem), and are killed if they use more.",
        ),
    ] = False,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Give each node its own network namespace, address and host name, on a bridge "
            "that can be cut or slowed (needs root).",
        ),
    ] = False,
    directory: Directory = DEFAULT_DIRECTORY,
) -> None:
    """Start a cluster that runs until `hydroslurm cluster down`."""
    from hydroslurm.devcluster import ClusterSpec, DevCluster
    from hydroslurm.devcluster.config import WARNING
    from hydroslurm.devcluster.spec import Proctrack, Profile

    spec = ClusterSpec(
        nodes=nodes,
        cpus_per_node=cpus,
        profile=cast("Profile", profile),
        directory=directory,
        grace_s=grace_s,
        kill_wait_s=kill_wait_s,
        proctrack=cast("Proctrack", proctrack),
        constrain_memory=constrain_memory,
        network=network,
    )
    cluster = DevCluster.up(spec, detach=True)
    option = _option(directory)
    typer.echo(f"*** {WARNING} ***")
    typer.echo(f"up: {nodes} x {cpus} CPUs, partitions low and urgent, in {cluster.directory}")
    if proctrack == "cgroup":
        typer.echo(f"proctrack/cgroup, nodes {', '.join(cluster.spec.node_names)}")
    if network:
        typer.echo(f"network of {cluster.spec.bridge}: {', '.join(cluster.spec.cables)}")
    if cluster.no_preempt:
        typer.echo(f"srun --preempt is not available: {cluster.no_preempt}")
    typer.echo(f'use it:  eval "$(hydroslurm cluster env{option})"')
    typer.echo(f"end it:  hydroslurm cluster down{option}")


@app.command()
def down(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Cancel all jobs, stop the cluster, and remove everything but its logs."""
    from hydroslurm.devcluster.cluster import end_cluster

    ended = end_cluster(directory)
    typer.echo(f"{'down' if ended else 'nothing is up'}: {directory.absolute()}")


@app.command()
def status(
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
) -> None:
    """Show the daemons and the nodes; exit status 1 if no cluster is up."""
    from dataclasses import asdict

    from hydroslurm.devcluster import DevCluster

    now = DevCluster.attach(directory).status()
    if as_json:
        typer.echo(json.dumps({**asdict(now), "directory": str(now.directory)}))
        return
    typer.echo(f"{now.directory}, profile {now.profile} (for trying and testing only)")
    for daemon in now.daemons:
        typer.echo(f"  {daemon.name:<12} {'runs' if daemon.alive else 'DEAD'}  pid {daemon.pid}")
    for node in now.nodes:
        typer.echo(f"  {node.name:<12} {node.state}")
    if not now.nodes:
        typer.echo("  slurmctld does not answer")


@app.command()
def env(directory: Directory = DEFAULT_DIRECTORY) -> None:
    """Print shell commands that point Slurm's programs to the cluster; use it with eval."""
    from hydroslurm.devcluster import DevCluster

    for name, value in DevCluster.attach(directory).environ().items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _option(directory: Path) -> str:
    return "" if directory == DEFAULT_DIRECTORY else f" --dir {shlex.quote(str(directory))}"
